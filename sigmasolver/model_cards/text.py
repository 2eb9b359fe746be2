"""The model card as Markdown."""

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
    """The model card as Markdown; every number is taken from `card.json`."""
    training, test, windows, unseen = (card[name] for name in ("training", "test", "windows", "unseen"))
    weights, measured, simulator = card["weights"], card["measured"], card["simulator"]
    count = windows["count"]
    shipped = "1 window, trajectory 0" if count == 1 else f"{count} windows, trajectories 0 to {count - 1}"
    flow = (
        " A flow continues from the last input frame at its full stored resolution, with time steps at the same "
        "Courant number."
        if test["horizon"] > 1
        else ""
    )
    grid = " × ".join(map(str, test["grid"]))
    changes = "".join(f', `--set "{setting}"`' for setting in training["changed"])
    lines = [
        f"# {card['name']}",
        "",
        f"{card['model']} for the task {card['task']} on {grid}: {card['parameters']:,} parameters, stored as "
        f"{weights['dtype']} ({weights['bytes'] / 1e6:.1f} MB).",
        f'`sigmasolver.load("{card["name"]}")`, `sigmasolver forecast {card["name"]}`.',
        "",
        "## Training",
        "",
        f"- Data: `{training['data']}`, {training['train']} trajectories for training and {training['test']} for "
        f"testing, fingerprint `{training['fingerprint'][:16]}`.",
        f"- Budget: {training['epochs']} epochs, {training['updates']:,} updates of batch {training['batch']}, "
        f"{100 * training['budget_share']:.3g} % of the paper's; {training['precision']}, seed {training['seed']}, "
        f"on one {test['machine']}.",
        f"- Settings: those of `sigmasolver train {card['task']}`{changes}.",
        "",
        "## Errors",
        "",
        f"Relative L2 error in per cent, mean ± standard deviation over cases; {test['yardstick']} is a trivial "
        "baseline.",
        "",
        f"| | {card['model']} | {test['yardstick']} | all seeds | paper |",
        "|---|--:|--:|--:|--:|",
    ]
    for row, fresh, own in zip(test["scores"], unseen["scores"], windows["scores"], strict=True):
        label, seeds = f"{row['field']}, {row['metric']}", list(row["seeds"].values())
        mean = sum(seeds) / len(seeds)
        deviation = (
            math.sqrt(sum((error - mean) ** 2 for error in seeds) / (len(seeds) - 1)) if len(seeds) > 1 else None
        )
        all_seeds = significant(100 * mean) if deviation is None else spread(100 * mean, 100 * deviation)
        paper = "–" if row["paper"] is None else row["paper"].replace("±", " ± ")
        for sample, score, other_columns in (
            (f"{label}, test split, {test['windows']} windows", row, f"{all_seeds} | {paper}"),
            (f"{label}, new simulation with seed {unseen['seed']}, {unseen['count']} cases", fresh, "– | –"),
            (f"{label}, the window{'s' * (count > 1)} of this folder, {count}", own, "– | –"),
        ):
            error = 100 * score["value"]
            error_text = significant(error) if score["deviation"] is None else spread(error, 100 * score["deviation"])
            lines.append(f"| {sample} | {error_text} | {significant(100 * score['yardstick'])} | {other_columns} |")
    seeds = test["scores"][0]["seeds"]
    selection = "The only seed that was trained."
    if len(seeds) > 1:
        selection = (
            f"The best of {len(seeds)} seeds ({', '.join(map(str, seeds))}), selected by this test error, so that "
            "error is "
        )
        selection += "biased low; the mean over seeds is not."
    roundings = "; ".join(
        f"{name} {100 * change['mean']:+.1e} ± {100 * change['deviation']:.1e}"
        for name, change in weights["changes"].items()
    )
    parameters = ", ".join(f"{name} {value}" for name, value in simulator["parameters"].items())
    lines += [
        "",
        " ".join(filter(None, (selection, card["note"]))),
        "",
        f"Stored as {weights['dtype']}: rounding the weights changes the error by (percentage points, mean ± deviation "
        f"over {unseen['count']} cases) {roundings}.",
        "",
        "## Windows",
        "",
        f"{shipped} of `sigmasolver simulate {card['task']} --seed {windows['seed']}`, at the resolution of the "
        f"model, float16, {windows['bytes'] / 1e6:.2f} MB, fingerprint `{windows['fingerprint'][:16]}`. This seed "
        "was not used for training.",
        f"float32 changes the error of a window by up to {windows['rounding']:.1e} (relative) from float64; a score "
        f"that differs from this card by more than {windows['tolerance']:.1e} (relative) indicates a fault.",
        "",
        "## Comparison with the solver",
        "",
        "One case at a time, the model in float32. The first row is the ground truth, the second the solver on the "
        f"model's grid, a third row the coarsest grid on which the solver is as accurate as the model.{flow}",
        "",
        "| | solver time / model time | relative L2 error of the solver (%) |",
        "|---|--:|--:|",
        *_solver_lines(card["solver"]),
        "",
        f"Measured with torch {measured['torch']} on {measured['machine']}, {measured['date']}.",
        "",
        "## Limits",
        "",
        f"- Trained on one simulator with one set of parameters ({simulator['name']}: {parameters}). Other "
        "parameters, boundary conditions, geometries and data from other sources were not tested.",
        f"- Trained and measured on {grid} only, for {test['horizon']} frame{'s' * (test['horizon'] > 1)}; other "
        "grids work, but were not tested.",
        "- The error is a mean over cases; a single case can be worse, and a forecast has no error bar.",
        "",
        f"Licence: {card['licence']}, as the package. Trained only on data simulated with the package; no "
        "third-party data.",
    ]
    return "\n".join(lines) + "\n"
