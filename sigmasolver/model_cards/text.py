"""The card as people read it."""

from __future__ import annotations

import math
from typing import Any

from sigmasolver.report.digits import significant, spread

__all__ = ["card_text"]


def _solver_lines(solver: dict[str, Any]) -> list[str]:
    lines = []
    for row in solver["rows"]:
        errors = "–" if row["errors"] is None else " / ".join(significant(100 * error) for error in row["errors"])
        ratio = significant(row["seconds"] / solver["model_seconds"])
        lines.append(f"| {' × '.join(map(str, row['grid']))} | {ratio} | {errors} |")
    return lines


def card_text(card: dict[str, Any]) -> str:
    """The card as people read it; every number is one of `card.json`."""
    training, test, windows, unseen = (card[name] for name in ("training", "test", "windows", "unseen"))
    weights, measured, simulator = card["weights"], card["measured"], card["simulator"]
    count = windows["count"]
    shipped = "1 window, trajectory 0" if count == 1 else f"{count} windows, trajectories 0 to {count - 1}"
    flow = (
        " A flow goes on from the last given frame in its full stored resolution, with time steps at the same Courant "
        "number."
        if test["horizon"] > 1
        else ""
    )
    grid = " × ".join(map(str, test["grid"]))
    lines = [
        f"# {card['name']}",
        "",
        f"{card['model']} for the task {card['task']} on {grid}: {card['parameters']:,} parameters, stored as "
        f"{weights['dtype']} ({weights['bytes'] / 1e6:.1f} MB).",
        f'`sigmasolver.load("{card["name"]}")`, `sigmasolver forecast {card["name"]}`.',
        "",
        "## Training",
        "",
        f"- Data: `{training['data']}`, {training['train']} trajectories for the training and "
        f"{training['test']} for the test, fingerprint `{training['fingerprint'][:16]}`.",
        f"- Budget: {training['epochs']} epochs, {training['updates']:,} updates of batch {training['batch']}, "
        f"{100 * training['budget_share']:.3g} % of the paper's; {training['precision']}, seed {training['seed']}, "
        f"on one {test['machine']}.",
        "",
        "## Errors",
        "",
        f"Relative L2 in per cent, mean ± standard deviation over cases; {test['yardstick']} has learned nothing.",
        "",
        f"| | {card['model']} | {test['yardstick']} | all seeds | paper |",
        "|---|--:|--:|--:|--:|",
    ]
    for row, more, again in zip(test["scores"], unseen["scores"], windows["scores"], strict=True):
        label, seeds = f"{row['field']}, {row['metric']}", list(row["seeds"].values())
        mean = sum(seeds) / len(seeds)
        apart = math.sqrt(sum((one - mean) ** 2 for one in seeds) / (len(seeds) - 1)) if len(seeds) > 1 else None
        every = significant(100 * mean) if apart is None else spread(100 * mean, 100 * apart)
        printed = "–" if row["paper"] is None else row["paper"].replace("±", " ± ")
        for where, one, last in (
            (f"{label}, test part, {test['windows']} windows", row, f"{every} | {printed}"),
            (f"{label}, simulated again with seed {unseen['seed']}, {unseen['count']} cases", more, "– | –"),
            (f"{label}, the window{'s' * (count > 1)} of this folder, {count}", again, "– | –"),
        ):
            own = 100 * one["value"]
            both = significant(own) if one["deviation"] is None else spread(own, 100 * one["deviation"])
            lines.append(f"| {where} | {both} | {significant(100 * one['yardstick'])} | {last} |")
    seeds = test["scores"][0]["seeds"]
    chosen = "The only seed that was trained."
    if len(seeds) > 1:
        chosen = (
            f"The best of {len(seeds)} seeds ({', '.join(map(str, seeds))}) by this very test error, so that error is "
        )
        chosen += "biased low; the mean over the seeds is not."
    changes = "; ".join(
        f"{name} {100 * change['mean']:+.1e} ± {100 * change['deviation']:.1e}"
        for name, change in weights["changes"].items()
    )
    parameters = ", ".join(f"{name} {value}" for name, value in simulator["parameters"].items())
    lines += [
        "",
        chosen,
        "",
        f"Stored as {weights['dtype']}: rounding the weights changes the error by (percentage points, mean ± deviation "
        f"over {unseen['count']} cases) {changes}.",
        "",
        "## Windows",
        "",
        f"{shipped} of "
        f"`sigmasolver simulate {card['task']} --seed {windows['seed']}`, thinned as the model sees them, float16, "
        f"{windows['bytes'] / 1e6:.2f} MB, fingerprint `{windows['fingerprint'][:16]}`. No training used this seed.",
        f"float32 differs from float64 by up to {windows['rounding']:.1e} of a window's error here; a score that is "
        f"more than {windows['tolerance']:.1e} of itself away from this card is a fault.",
        "",
        "## Beside the solver",
        "",
        "One case at a time, the model in float32. The first row is the truth, the next the solver on the model's "
        f"grid, a third the coarsest grid on which the solver is as good as the model.{flow}",
        "",
        "| | seconds of the solver / seconds of the model | relative L2 of the solver in per cent |",
        "|---|--:|--:|",
        *_solver_lines(card["solver"]),
        "",
        f"Measured with torch {measured['torch']} on {measured['machine']}, {measured['date']}.",
        "",
        "## Limits",
        "",
        f"- Trained on one simulator with one set of parameters ({simulator['name']}: {parameters}). Other parameters, "
        "boundary conditions, geometries and data of other origin were not measured.",
        f"- Trained and measured on {grid} only, for {test['horizon']} frame{'s' * (test['horizon'] > 1)}; on "
        "other grids it runs, and was not measured.",
        "- The error is a mean over cases; a single case can be worse, and there is no error bar with a forecast.",
        "",
        f"Licence: {card['licence']}, as the package. Trained on data that the package simulates; nothing of others "
        "is in it.",
    ]
    return "\n".join(lines) + "\n"
