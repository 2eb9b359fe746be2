"""One training update and one forward pass at the paper's sizes: the paper's protocol against what trains here.

    python benchmarks/step.py --device cuda --out results/step.jsonl
    python benchmarks/step.py kf2d --forms reference,fused --precisions bf16
    python benchmarks/step.py ns2d --models transolver-sigma,transolver,ffno

Forms: `reference` is torch as it is, float32, TF32 off, FFTs, plain operations, NS2D as ten single-frame passes and one
update. Against it the same model with thin matrix products for FFTs and NS2D's ten frames in one batch: `eager`;
`plain` and `fused`, the whole update as one CUDA graph with plain or fused operations; `single`, fused operations one
by one in one stream; `compiled`, a graph of what torch.compile makes. The forward pass is one call of the model on a
batch without gradients, a graph where the update is one. Ratios are within one run; random data. The floor
(benchmarks/floor.py) takes the rates of a copy and of a matrix product that are measured at the start of the same run;
a form's share is floor / update.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from floor import Floor, Rates, floor, measured_rates
from measure import append_rows
from noise import SEED, Subject, forecaster_of, windows_of
from torch import nn

from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops import dispatch
from sigmasolver.ops.fourier import axis_fourier_rfft
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.runs import provenance
from sigmasolver.runtime.parallel import World
from sigmasolver.tasks import field_groups
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.dry_run import Rehearsal
from sigmasolver.train.engine import Execution
from sigmasolver.train.objectives import Loss

SIGMA = "transolver-sigma"
Call = Callable[[], object]


@dataclass(frozen=True)
class Form:
    """How an update is run, and the precisions it is measured in unless others are asked for."""

    label: str
    engine: str
    plain: bool
    precisions: tuple[str, ...]

    def operations(self) -> AbstractContextManager[None]:
        return dispatch.plain() if self.plain else nullcontext()


FORMS = {
    "reference": Form("reference", "eager", True, ("float32",)),
    "eager": Form("eager, plain", "eager", True, ("float32",)),
    "compiled": Form("compiled", "compiled-graph", True, ("bf16",)),
    "plain": Form("graph, plain", "graph", True, ("bf16",)),
    "fused": Form("graph, fused", "graph", False, ("float32", "tf32", "bf16")),
    "single": Form("eager, fused", "eager", False, ("bf16",)),
}
PEERS = {"reference": ("float32",), "fused": ("bf16",)}
"""What is measured of a model that only stands beside: as published, and as it trains here."""


def reference(recipe: Recipe, device: torch.device) -> tuple[Call, nn.Module]:
    """The paper's protocol: one update, and the model it updates."""
    if recipe.train.objective == "pushforward":
        raise ValueError("The reference is written for direct and teacher-forced training; leave it out of --forms.")
    windows, forecaster = windows_of(recipe, device), forecaster_of(recipe, device)
    for module in forecaster.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft
    optimiser = torch.optim.AdamW(forecaster.parameters(), lr=1e-4, weight_decay=1e-5)
    criterion = Loss(tuple(field_groups(recipe.task.targets).values()), recipe.train.derivative)
    history, future = windows.batch(list(range(recipe.train.batch)))
    ahead = recipe.task.horizon if recipe.train.objective == "teacher_forced" else 1

    def update() -> None:
        optimiser.zero_grad(set_to_none=True)
        frames = torch.cat((history, future), dim=1) if ahead > 1 else history
        for lead in range(ahead):
            given = frames[:, lead : lead + recipe.task.history]
            truth = future[:, lead : lead + 1] if ahead > 1 else future[:, : recipe.task.block]
            criterion(forecaster(given), truth).mean().backward()
        optimiser.step()

    return update, forecaster.model


def engine_step(form: Form, recipe: Recipe, device: torch.device) -> tuple[Call, nn.Module]:
    """The package's own update in this form, and the network as it is called in it."""
    rehearsal = Rehearsal(recipe, Execution(World(device=device), form.engine))
    return rehearsal, rehearsal.stepper.forecaster.model


def inference(model: nn.Module, form: Form, recipe: Recipe, device: torch.device) -> Call:
    """One forward pass of a batch, captured where the form's update is."""
    x = torch.randn(recipe.train.batch, *recipe.task.grid, recipe.task.in_channels, device=device)
    captured, precision = form.engine.endswith("graph"), recipe.train.precision

    def forward() -> None:
        autocast = torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=not captured
        )
        with torch.no_grad(), autocast:
            model(x)

    if not captured:
        return forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def milliseconds(call: Call, count: int, device: torch.device) -> float:
    """Of one call, after the ones that warm up and capture."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP + 2):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return 1e3 * (time.perf_counter() - start) / count


def measured(subject: Subject, name: str, precision: str, device: torch.device, steps: int) -> dict[str, object]:
    """The numbers of one form, or why it has none; nothing of it stays on the device."""
    form, recipe = FORMS[name], subject.recipe(precision)
    left = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # by the forms before this one
    try:
        with form.operations(), matmul_precision(precision):
            update, model = reference(recipe, device) if name == "reference" else engine_step(form, recipe, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            numbers: dict[str, object] = {"milliseconds": milliseconds(update, steps, device)}
            if device.type == "cuda":
                numbers["gigabytes"] = (torch.cuda.max_memory_allocated() - left) / 1e9
            numbers["forward_milliseconds"] = milliseconds(inference(model, form, recipe, device), steps, device)
            return numbers
    except Exception as error:  # out of memory, or a compiler that fails: the other forms are still worth their time
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        update = model = None  # type: ignore[assignment]
        gc.collect()
        if form.engine.startswith("compiled"):
            torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def cells(model: str, forms: list[str], precisions: list[str] | None) -> Iterator[tuple[str, str]]:
    """Form and precision of every measurement, the reference first."""
    for name in sorted(forms, key=list(FORMS).index):
        if model != SIGMA and name not in PEERS:
            continue
        usual = FORMS[name].precisions if model == SIGMA else PEERS[name]
        for precision in usual if name == "reference" or precisions is None else precisions:
            yield name, precision


def ratio(above: object, below: object) -> float | None:
    return above / below if isinstance(above, float) and isinstance(below, float) else None


def show(row: dict[str, object]) -> None:
    def number(key: str, pattern: str, unit: str) -> str:
        value = row.get(key)
        return format(value, pattern) + unit if isinstance(value, float) else " " * len(format(0.0, pattern) + unit)

    if "error" in row:
        said = str(row["error"])
    else:
        said = "  ".join(
            (
                "update " + number("milliseconds", "8.2f", " ms") + number("ratio", "7.2f", "x"),
                "forward " + number("forward_milliseconds", "8.2f", " ms") + number("forward_ratio", "7.2f", "x"),
                number("gigabytes", "6.2f", " GB"),
                "share of the floor " + number("share", "6.1%", "") if row.get("share") else "",
                "against sigma " + number("over_sigma", "5.2f", "x") if row.get("over_sigma") else "",
            )
        )
    print(f"{row['task']:8} {row['model']:17} {row['form']:13} {row['precision']:8} {said}".rstrip(), flush=True)


def compared(row: dict[str, object], base: dict[str, object], least: Floor | None, rates: Rates) -> dict[str, object]:
    """The row with its ratios to the reference and its share of the floor."""
    row["ratio"] = ratio(base.get("milliseconds"), row.get("milliseconds"))
    row["forward_ratio"] = ratio(base.get("forward_milliseconds"), row.get("forward_milliseconds"))
    if least is not None:
        row["floor_milliseconds"] = least.milliseconds(rates)
        row["share"] = ratio(row["floor_milliseconds"], row.get("milliseconds"))
    return row


def run(given: argparse.Namespace, subject: Subject, rates: Rates, sigma: dict[tuple[str, str], object]) -> None:
    """Every form of one task and model; `sigma` collects the times of Transolver-sigma for its peers."""
    device, recipe, base = given.device, subject.recipe(), dict[str, object]()
    steps = given.steps or (6 if len(recipe.task.grid) == 3 else 20)
    least = floor(recipe, 2 if device.type == "cuda" else 4) if subject.model == SIGMA else None
    if least is not None:
        counted = f"{least.bytes / 1e9:.2f} GB, {least.flops / 1e12:.3f} TFLOP, {least.milliseconds(rates):.2f} ms"
        print(f"{subject.task:8} floor of one update: {counted}", flush=True)
    source = {"seed": SEED, "steps": steps, "settings": list(subject.settings), **provenance(device)}
    source |= {"bytes_per_second": rates.bytes_per_second, "flops_per_second": rates.flops_per_second}
    for name, precision in cells(subject.model, given.forms, given.precisions):
        row: dict[str, object] = {"benchmark": "step", "task": subject.task, "model": subject.model}
        row |= {"form": FORMS[name].label, "precision": precision}
        row |= measured(subject, name, precision, device, steps)
        base = row if name == "reference" else base
        row = compared(row, base, least, rates)
        if subject.model == SIGMA:
            sigma[name, precision] = row.get("milliseconds")
        elif (beside := ratio(row.get("milliseconds"), sigma.get((name, precision)))) is not None:
            row["over_sigma"] = beside
        show(row)
        if given.out:
            append_rows(given.out, [{**row, **source}])


def words() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def listed(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser.add_argument("tasks", nargs="*", default=["darcy", "ns2d", "kf2d", "smoke3d"])
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--models", default=[SIGMA], type=listed, help="transolver-sigma first, then its peers")
    parser.add_argument("--forms", default=["reference", "compiled", "plain", "fused"], type=listed)
    parser.add_argument("--precisions", type=listed, help="for every form but the reference; else as each form has it")
    parser.add_argument("--steps", type=int, help="timed calls; else 20, or 6 in three dimensions")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = words()
    given = parser.parse_args()
    unknown = [name for name in given.forms if name not in FORMS]
    if unknown:
        parser.error(f'there is no form "{unknown[0]}"; choose from {", ".join(FORMS)}')
    rates = measured_rates(given.device)
    print(
        f"{provenance(given.device)['machine']}: a copy moves {rates.bytes_per_second / 1e12:.2f} TB/s, "
        f"a matrix product does {rates.flops_per_second / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    for task in given.tasks:
        sigma: dict[tuple[str, str], object] = {}
        for model in given.models:
            run(given, Subject(task, model, tuple(given.settings)), rates, sigma)


if __name__ == "__main__":
    main()
