"""One training update and one forward pass at the paper's sizes: the paper's protocol compared with this package.

    python benchmarks/step.py --device cuda --out results/step.jsonl
    python benchmarks/step.py kf2d --forms reference,fused --precisions bf16
    python benchmarks/step.py ns2d --models transolver-sigma,transolver,ffno

Forms: `reference` is plain torch, float32, TF32 off, FFTs, NS2D as ten single-frame passes and one update. The others
use thin matrix products instead of FFTs and NS2D's ten frames in one batch: `eager`; `plain` and `fused`, the full
update as one CUDA graph with plain or fused operations; `single`, eager fused operations in one stream; `compiled`, a
graph of the output of torch.compile. The forward pass is one call of the model on a batch without gradients, captured
as a graph if the update is. Ratios are within one run; random data. The floor (benchmarks/floor.py) uses the rates of a
copy and a matrix product measured at the start of the same run; the share of a form is floor / update.
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
from sigmasolver.train.dry_run import DryRun
from sigmasolver.train.engine import Execution
from sigmasolver.train.objectives import Loss

SIGMA = "transolver-sigma"
Call = Callable[[], object]


@dataclass(frozen=True)
class Form:
    """How an update is run, and the precisions to measure by default."""

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
"""Forms and precisions of the models to compare with: as published, and as trained here."""


def reference(recipe: Recipe, device: torch.device) -> tuple[Call, nn.Module]:
    """The paper's protocol: a function that runs one update, and its model."""
    if recipe.train.objective == "pushforward":
        raise ValueError("The reference is written for direct and teacher-forced training; leave it out of --forms.")
    windows, forecaster = windows_of(recipe, device), forecaster_of(recipe, device)
    for module in forecaster.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft
    optimiser = torch.optim.AdamW(forecaster.parameters(), lr=1e-4, weight_decay=1e-5)
    criterion = Loss(tuple(field_groups(recipe.task.targets).values()), recipe.train.derivative)
    history, future = windows.batch(list(range(recipe.train.batch)))
    leads = recipe.task.horizon if recipe.train.objective == "teacher_forced" else 1

    def update() -> None:
        optimiser.zero_grad(set_to_none=True)
        frames = torch.cat((history, future), dim=1) if leads > 1 else history
        for lead in range(leads):
            inputs = frames[:, lead : lead + recipe.task.history]
            truth = future[:, lead : lead + 1] if leads > 1 else future[:, : recipe.task.block]
            criterion(forecaster(inputs), truth).mean().backward()
        optimiser.step()

    return update, forecaster.model


def engine_step(form: Form, recipe: Recipe, device: torch.device) -> tuple[Call, nn.Module]:
    """The update of this package in this form, and its model."""
    dry_run = DryRun(recipe, Execution(World(device=device), form.engine))
    return dry_run, dry_run.stepper.forecaster.model


def inference(model: nn.Module, form: Form, recipe: Recipe, device: torch.device) -> Call:
    """One forward pass of a batch, captured as a graph if the update is."""
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
    """Mean time of one call, after warm-up and capture."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP + 2):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def measure_form(subject: Subject, name: str, precision: str, device: torch.device, steps: int) -> dict[str, object]:
    """Measure one form, or return its error; its device memory is freed afterwards."""
    form, recipe = FORMS[name], subject.recipe(precision)
    baseline = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # not freed by earlier forms
    try:
        with form.operations(), matmul_precision(precision):
            update, model = reference(recipe, device) if name == "reference" else engine_step(form, recipe, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            numbers: dict[str, object] = {"milliseconds": milliseconds(update, steps, device)}
            if device.type == "cuda":
                numbers["gigabytes"] = (torch.cuda.max_memory_allocated() - baseline) / 1e9
            numbers["forward_milliseconds"] = milliseconds(inference(model, form, recipe, device), steps, device)
            return numbers
    except Exception as error:  # such as out of memory or a compiler failure: continue with the other forms
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
        default = FORMS[name].precisions if model == SIGMA else PEERS[name]
        for precision in default if name == "reference" or precisions is None else precisions:
            yield name, precision


def ratio(numerator: object, denominator: object) -> float | None:
    return numerator / denominator if isinstance(numerator, float) and isinstance(denominator, float) else None


def show(row: dict[str, object]) -> None:
    def number(key: str, pattern: str, unit: str) -> str:
        value = row.get(key)
        return format(value, pattern) + unit if isinstance(value, float) else " " * len(format(0.0, pattern) + unit)

    if "error" in row:
        text = str(row["error"])
    else:
        text = "  ".join(
            (
                "update " + number("milliseconds", "8.2f", " ms") + number("ratio", "7.2f", "x"),
                "forward " + number("forward_milliseconds", "8.2f", " ms") + number("forward_ratio", "7.2f", "x"),
                number("gigabytes", "6.2f", " GB"),
                "share of the floor " + number("share", "6.1%", "") if row.get("share") else "",
                "against sigma " + number("over_sigma", "5.2f", "x") if row.get("over_sigma") else "",
            )
        )
    print(f"{row['task']:8} {row['model']:17} {row['form']:13} {row['precision']:8} {text}".rstrip(), flush=True)


def add_ratios(row: dict[str, object], base: dict[str, object], bound: Floor | None, rates: Rates) -> dict[str, object]:
    """Add the ratios to the reference and the share of the floor to the row."""
    row["ratio"] = ratio(base.get("milliseconds"), row.get("milliseconds"))
    row["forward_ratio"] = ratio(base.get("forward_milliseconds"), row.get("forward_milliseconds"))
    if bound is not None:
        row["floor_milliseconds"] = bound.milliseconds(rates)
        row["share"] = ratio(row["floor_milliseconds"], row.get("milliseconds"))
    return row


def run(args: argparse.Namespace, subject: Subject, rates: Rates, sigma: dict[tuple[str, str], object]) -> None:
    """Measure every form of one task and model; `sigma` collects the times of Transolver-sigma for its peers."""
    device, recipe, base = args.device, subject.recipe(), dict[str, object]()
    steps = args.steps or (6 if len(recipe.task.grid) == 3 else 20)
    bound = floor(recipe, 2 if device.type == "cuda" else 4) if subject.model == SIGMA else None
    if bound is not None:
        text = f"{bound.bytes / 1e9:.2f} GB, {bound.flops / 1e12:.3f} TFLOP, {bound.milliseconds(rates):.2f} ms"
        print(f"{subject.task:8} floor of one update: {text}", flush=True)
    source = {"seed": SEED, "steps": steps, "settings": list(subject.settings), **provenance(device)}
    source |= {"bytes_per_second": rates.bytes_per_second, "flops_per_second": rates.flops_per_second}
    for name, precision in cells(subject.model, args.forms, args.precisions):
        row: dict[str, object] = {"benchmark": "step", "task": subject.task, "model": subject.model}
        row |= {"form": FORMS[name].label, "precision": precision}
        row |= measure_form(subject, name, precision, device, steps)
        base = row if name == "reference" else base
        row = add_ratios(row, base, bound, rates)
        if subject.model == SIGMA:
            sigma[name, precision] = row.get("milliseconds")
        elif (over_sigma := ratio(row.get("milliseconds"), sigma.get((name, precision)))) is not None:
            row["over_sigma"] = over_sigma
        show(row)
        if args.out:
            append_rows(args.out, [{**row, **source}])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def split_commas(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser.add_argument("tasks", nargs="*", default=["darcy", "ns2d", "kf2d", "smoke3d"])
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--models", default=[SIGMA], type=split_commas, help="transolver-sigma first, then its peers")
    parser.add_argument("--forms", default=["reference", "compiled", "plain", "fused"], type=split_commas)
    parser.add_argument(
        "--precisions", type=split_commas, help="for every form but the reference; else as each form has it"
    )
    parser.add_argument("--steps", type=int, help="timed calls; else 20, or 6 in three dimensions")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    unknown = [name for name in args.forms if name not in FORMS]
    if unknown:
        parser.error(f'there is no form "{unknown[0]}"; choose from {", ".join(FORMS)}')
    rates = measured_rates(args.device)
    print(
        f"{provenance(args.device)['machine']}: a copy moves {rates.bytes_per_second / 1e12:.2f} TB/s, "
        f"a matrix product does {rates.flops_per_second / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    for task in args.tasks:
        sigma: dict[tuple[str, str], object] = {}
        for model in args.models:
            run(args, Subject(task, model, tuple(args.settings)), rates, sigma)


if __name__ == "__main__":
    main()
