"""The command that lists models."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.terminal import console

__all__ = ["models"]


@app.command()
def models(plugin: Plugins = None) -> None:
    """List the models and baselines with their size on the Darcy task, and the pretrained models."""
    from sigmasolver.models import count_parameters, list_models, matched_width
    from sigmasolver.recipes import recipe_of

    reference = recipe_of("darcy")
    target = count_parameters(reference.model.name, reference.model.config(reference.task))
    table = Table("model", box=SIMPLE_HEAD)
    for column in ("parameters", "MB", "width for equal size"):
        table.add_column(column, justify="right")
    for name in list_models():
        recipe = recipe_of("darcy", name)
        model, config = recipe.model.name, recipe.model.config(recipe.task)
        parameters = count_parameters(model, config)
        try:
            width = str(matched_width(model, config, target))
        except ValueError:  # the size of a custom model may not depend on the width
            width = "–"
        table.add_row(name, f"{parameters:,}", f"{4 * parameters / 1e6:.2f}", width)
    console().print(table)
    console().print("  trainable parameters for: sigmasolver train darcy --model NAME\n", soft_wrap=True)
    _print_pretrained()


def _print_pretrained() -> None:
    from sigmasolver import pretrained

    table = Table(box=SIMPLE_HEAD)
    table.add_column("pretrained", no_wrap=True)
    table.add_column("model", overflow="fold")
    for column in ("parameters", "error %", "paper %", "budget"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in pretrained.names():
        card = pretrained.card(name)
        scores = card["test"]["scores"]
        task = "" if name == card["task"] else f"{card['task']} "
        table.add_row(
            f"{name} {task}".strip(),
            f"{card['model']} {'×'.join(map(str, card['test']['grid']))}",
            f"{card['parameters']:,}",
            "\n".join(f"{100 * row['value']:.3g}" for row in scores),
            "\n".join((row["paper"] or "–").replace("±", " ± ") for row in scores),
            f"{100 * card['training']['budget_share']:.3g} %",
        )
    console().print(table)
    note = "  relative L2 error on the test split (flows: all frames, and the last), share of the paper's epochs"
    console().print(f"{note}\n  try one: sigmasolver forecast NAME", soft_wrap=True)
