"""Regenerate every card.md from card.json: `python -m sigmasolver.model_cards`."""

from sigmasolver import pretrained
from sigmasolver.model_cards.text import card_text

for name in pretrained.names():
    (pretrained.folder(name) / "card.md").write_text(card_text(pretrained.card(name)))
