"""Pretrained models: measure them (`score`), run them on their windows (`demonstrate`), write their folder (`make`,
`share`) and their card (`text`)."""
