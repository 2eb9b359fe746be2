"""Transolver-sigma on a CPU: layouts of the depthwise convolution, alone and in whole models, and FFTs.

    OMP_NUM_THREADS=2 python benchmarks/cpu.py [--threads 2] [--out results/cpu.jsonl]

Layouts of a convolution on channels-last fields: `ours`, as sigmasolver.ops.convolution has it; `copies`, contiguous
channels-first tensors before and channels-last ones behind it; `shifted`, a sum of shifted products; `planes`, two
axes at a time (a line as a plane of height one, a cube as a sum of its shifted planes). Whole models: `ours`; `rfft`,
with FFTs for the thin matrix products; `naive`, FFTs and copies, as one writes it first; and `ours` with the other
layouts. Interleaved medians, ratios to `ours`; float32, eager, random data, seed 0.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from measure import append_rows, compare
from noise import SEED, Subject
from torch import nn

from sigmasolver.models import Options, SolverConfig, build_solver
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops import convolution
from sigmasolver.ops.convolution import PADDINGS
from sigmasolver.ops.fourier import axis_fourier, axis_fourier_rfft
from sigmasolver.ops.memory import keep_freed_memory
from sigmasolver.runs import provenance

Layout = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[str]], torch.Tensor]
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
CPU = torch.device("cpu")


def filled(x: torch.Tensor, weight: torch.Tensor, padding: Sequence[str], kinds: Sequence[str]) -> torch.Tensor:
    """(B, *grid, C) with the cells beyond its ends that the kernel reads, on axes that end in one of `kinds`."""
    for axis, kind in enumerate(padding, start=1):
        reach, n = weight.shape[axis + 1] // 2, x.shape[axis]
        if kind == "circular" and kind in kinds:
            x = torch.cat((x.narrow(axis, n - reach, reach), x, x.narrow(axis, 0, reach)), dim=axis)
        elif kind in kinds:
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [reach, reach])
    return x


def zeros(weight: torch.Tensor, padding: Sequence[str]) -> list[int]:
    """Cells that the convolution itself adds at both ends of each axis."""
    return [length // 2 if kind == "zeros" else 0 for kind, length in zip(padding, weight.shape[2:], strict=True)]


def copies(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    y = filled(x, weight, padding, ["circular"]).movedim(-1, 1).contiguous()
    convolve = CONVOLUTIONS[len(padding) - 1]
    return convolve(y, weight, bias, padding=zeros(weight, padding), groups=len(weight)).movedim(1, -1).contiguous()


def shifted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    y, total = filled(x, weight, padding, PADDINGS), bias.expand_as(x)
    cells = itertools.product(*(range(length) for length in weight.shape[2:]))
    for cell, kernel in zip(cells, weight.flatten(1).unbind(1), strict=True):
        part = y
        for axis, offset in enumerate(cell, start=1):
            part = part.narrow(axis, offset, x.shape[axis])
        total = torch.addcmul(total, part, kernel)
    return total


def planes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    def plane(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, ends: Sequence[str]) -> torch.Tensor:
        y = filled(y, w, ends, ["circular"])
        return F.conv2d(y.movedim(-1, 1), w, b, padding=zeros(w, ends), groups=len(w)).movedim(1, -1)

    if len(padding) == 1:
        return plane(x[:, None], weight[:, :, None], bias, ("zeros", *padding))[:, 0]
    if len(padding) == 2:
        return plane(x, weight, bias, padding)
    depth, y = x.shape[1], filled(x, weight, (padding[0], "none", "none"), PADDINGS)
    total: torch.Tensor | None = None
    for offset, w in enumerate(weight.unbind(2)):
        layers = plane(y[:, offset : offset + depth].flatten(0, 1), w, None if offset else bias, padding[1:])
        total = layers if total is None else total + layers
    assert total is not None
    return total.unflatten(0, (-1, depth))


LAYOUTS: dict[str, Layout] = {
    "ours": convolution._plain,
    "copies": copies,
    "shifted": shifted,
    "planes": planes,
}
FORMS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "ours": ("ours", axis_fourier),
    "rfft": ("ours", axis_fourier_rfft),
    "naive": ("copies", axis_fourier_rfft),
    **{layout: (layout, axis_fourier) for layout in ("copies", "shifted", "planes")},
}
"""Of a whole model: the layout of its convolutions and its Fourier operator."""


def cases() -> dict[str, tuple[int, SolverConfig]]:
    """Batch and sizes: two of the paper's tasks, the demo, and small models on a line and in a cube."""

    def paper(task: str) -> SolverConfig:
        recipe = Subject(task).recipe()
        return recipe.model.config(recipe.task)

    demo = Options(padding=("circular", "circular"))
    line = SolverConfig((2048,), 4, 1, width=64, depth=2, heads=4)
    return {
        "darcy": (1, paper("darcy")),
        "ns2d": (1, paper("ns2d")),
        "demo": (4, SolverConfig((32, 32), 2, 1, width=32, depth=3, heads=2, slices=16, modes=8, options=demo)),
        "line": (2, line),
        "cube": (1, replace(line, grid=(16, 16, 16), depth=1)),
    }


def operation(grid: tuple[int, ...], channels: int, kernel: int) -> dict[str, dict[str, Callable[[], object]]]:
    """One convolution in every layout: forward, and forward with all gradients."""
    x = torch.randn(1, *grid, channels, requires_grad=True)
    weight = torch.randn(channels, 1, *(kernel,) * len(grid), requires_grad=True)
    bias, answer = torch.randn(channels, requires_grad=True), torch.randn_like(x)

    def infer(layout: Layout) -> object:
        with torch.inference_mode():
            return layout(x, weight, bias, ("zeros",) * len(grid))

    def learn(layout: Layout) -> object:
        return torch.autograd.grad(layout(x, weight, bias, ("zeros",) * len(grid)), (x, weight, bias), answer)

    return {
        "forward": {name: partial(infer, layout) for name, layout in LAYOUTS.items()},
        "forward+backward": {name: partial(learn, layout) for name, layout in LAYOUTS.items()},
    }


def in_form(model: nn.Module, form: str, x: torch.Tensor) -> torch.Tensor:
    """The model's answer, computed in this form."""
    layout, fourier = FORMS[form]
    for module in model.modules():
        if isinstance(module, SpectralOperator):
            module.operator = fourier
    with mock.patch.object(convolution, "_plain", LAYOUTS[layout]):
        return model(x)


def whole(batch: int, config: SolverConfig) -> dict[str, dict[str, Callable[[], object]]]:
    """One model in every form: forward, and an update with AdamW."""
    model = build_solver("transolver-sigma", config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(batch, *config.grid, config.in_channels)

    def infer(form: str) -> object:
        with torch.inference_mode():
            return in_form(model, form, x)

    def update(form: str) -> object:
        optimiser.zero_grad(set_to_none=True)
        in_form(model, form, x).square().mean().backward()
        return optimiser.step()

    # In two dimensions planes are what ours is.
    forms = [form for form in FORMS if form != "planes" or config.axes != 2]
    return {
        "forward": {form: partial(infer, form) for form in forms},
        "update": {form: partial(update, form) for form in forms},
    }


def report(
    what: dict[str, object], candidates: Mapping[str, Callable[[], object]], repeats: int
) -> list[dict[str, object]]:
    """Measure and print; one row for every candidate."""
    seconds = compare(candidates, CPU, repeats)
    shown = "  ".join(f"{name} {1e3 * value:8.2f} ({value / seconds['ours']:5.2f})" for name, value in seconds.items())
    print(f"{what['subject']:11} {what['case']:14} {what['pass']:16} ms (against ours): {shown}", flush=True)
    return [
        {**what, "form": name, "milliseconds": 1e3 * value, "over_ours": value / seconds["ours"], "repeats": repeats}
        for name, value in seconds.items()
    ]


def listed(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--threads", default=2, type=int)
    words.add_argument(
        "--repeats", default=3, type=int, help="of a whole model; a convolution alone has three times as many"
    )
    words.add_argument("--cases", default=list(cases()), type=listed)
    words.add_argument("--grids", default=["4096", "85x85", "64x64", "16x16x16"], type=listed)
    words.add_argument("--system", action="store_true", help="freed memory goes back to the system")
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    kept = not given.system and keep_freed_memory()
    torch.set_num_threads(given.threads)
    torch.manual_seed(SEED)
    source = {"precision": "float32", "seed": SEED, "memory": "kept" if kept else "system", **provenance(CPU)}
    print(f"{source['machine']}, torch {source['torch']}, freed memory: {source['memory']}", flush=True)

    def keep(rows: list[dict[str, object]]) -> None:
        if given.out:
            append_rows(given.out, [{"benchmark": "cpu", **row, **source} for row in rows])

    for text in given.grids:
        grid = tuple(int(points) for points in text.split("x"))
        channels = 128 if text == "64x64" else 64
        for kernel in (3, 5):
            what = {"subject": "convolution", "case": f"{text}x{channels}, {kernel}", "kernel": kernel}
            for name, candidates in operation(grid, channels, kernel).items():
                keep(report({**what, "pass": name}, candidates, 3 * given.repeats))
    for case in given.cases:
        batch, config = cases()[case]
        what = {"subject": "model", "case": case, "size": "x".join(map(str, (batch, *config.grid)))}
        for name, candidates in whole(batch, config).items():
            keep(report({**what, "pass": name}, candidates, given.repeats))


if __name__ == "__main__":
    main()
