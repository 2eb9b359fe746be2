"""Transolver-sigma on a CPU: layouts of the depthwise convolution, alone and in full models, and FFTs.

    OMP_NUM_THREADS=2 python benchmarks/cpu.py [--threads 2] [--out results/cpu.jsonl]

Layouts of a convolution on channels-last fields: `ours`, from sigmasolver.ops.convolution; `copies`, with copies to
contiguous channels-first and back; `shifted`, a sum of shifted products; `planes`, two axes at a time (a line as a
plane of height one, a cube as a sum of shifted planes). Full models: `ours`; `rfft`, with FFTs instead of thin matrix
products; `naive`, FFTs and copies, the straightforward implementation; and `ours` with the other layouts.
Interleaved medians, ratios to `ours`; float32, eager, random data, seed 0.
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


def pad(x: torch.Tensor, weight: torch.Tensor, padding: Sequence[str], kinds: Sequence[str]) -> torch.Tensor:
    """Pad (B, *grid, C) by the half width of the kernel, on axes whose padding is one of `kinds`."""
    for axis, kind in enumerate(padding, start=1):
        half_width, n = weight.shape[axis + 1] // 2, x.shape[axis]
        if kind == "circular" and kind in kinds:
            x = torch.cat((x.narrow(axis, n - half_width, half_width), x, x.narrow(axis, 0, half_width)), dim=axis)
        elif kind in kinds:
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [half_width, half_width])
    return x


def zero_padding(weight: torch.Tensor, padding: Sequence[str]) -> list[int]:
    """Zero padding of each axis that is left to the convolution."""
    return [length // 2 if kind == "zeros" else 0 for kind, length in zip(padding, weight.shape[2:], strict=True)]


def copies(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    y = pad(x, weight, padding, ["circular"]).movedim(-1, 1).contiguous()
    convolve = CONVOLUTIONS[len(padding) - 1]
    return (
        convolve(y, weight, bias, padding=zero_padding(weight, padding), groups=len(weight)).movedim(1, -1).contiguous()
    )


def shifted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    y, total = pad(x, weight, padding, PADDINGS), bias.expand_as(x)
    cells = itertools.product(*(range(length) for length in weight.shape[2:]))
    for cell, kernel in zip(cells, weight.flatten(1).unbind(1), strict=True):
        window = y
        for axis, offset in enumerate(cell, start=1):
            window = window.narrow(axis, offset, x.shape[axis])
        total = torch.addcmul(total, window, kernel)
    return total


def planes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    def plane(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plane_padding: Sequence[str]) -> torch.Tensor:
        y = pad(y, w, plane_padding, ["circular"])
        return F.conv2d(y.movedim(-1, 1), w, b, padding=zero_padding(w, plane_padding), groups=len(w)).movedim(1, -1)

    if len(padding) == 1:
        return plane(x[:, None], weight[:, :, None], bias, ("zeros", *padding))[:, 0]
    if len(padding) == 2:
        return plane(x, weight, bias, padding)
    depth, y = x.shape[1], pad(x, weight, (padding[0], "none", "none"), PADDINGS)
    total: torch.Tensor | None = None
    for offset, w in enumerate(weight.unbind(2)):
        plane_sums = plane(y[:, offset : offset + depth].flatten(0, 1), w, None if offset else bias, padding[1:])
        total = plane_sums if total is None else total + plane_sums
    assert total is not None
    out: torch.Tensor = total.unflatten(0, (-1, depth))
    return out


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
"""Forms of a full model: the layout of its convolutions and its Fourier operator."""


def cases() -> dict[str, tuple[int, SolverConfig]]:
    """Batch size and model sizes: two of the paper's tasks, the demo, and small models in 1D and 3D."""

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


def convolution_passes(grid: tuple[int, ...], channels: int, kernel: int) -> dict[str, dict[str, Callable[[], object]]]:
    """One convolution in every layout: forward, and forward with all gradients."""
    x = torch.randn(1, *grid, channels, requires_grad=True)
    weight = torch.randn(channels, 1, *(kernel,) * len(grid), requires_grad=True)
    bias, grad_output = torch.randn(channels, requires_grad=True), torch.randn_like(x)

    def infer(layout: Layout) -> object:
        with torch.inference_mode():
            return layout(x, weight, bias, ("zeros",) * len(grid))

    def backward(layout: Layout) -> object:
        return torch.autograd.grad(layout(x, weight, bias, ("zeros",) * len(grid)), (x, weight, bias), grad_output)

    return {
        "forward": {name: partial(infer, layout) for name, layout in LAYOUTS.items()},
        "forward+backward": {name: partial(backward, layout) for name, layout in LAYOUTS.items()},
    }


def in_form(model: nn.Module, form: str, x: torch.Tensor) -> torch.Tensor:
    """The output of the model, computed in this form."""
    layout, fourier = FORMS[form]
    for module in model.modules():
        if isinstance(module, SpectralOperator):
            module.operator = fourier
    with mock.patch.object(convolution, "_plain", LAYOUTS[layout]):
        out: torch.Tensor = model(x)
        return out


def model_passes(batch: int, config: SolverConfig) -> dict[str, dict[str, Callable[[], object]]]:
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

    # In 2D, `planes` is identical to `ours`.
    forms = [form for form in FORMS if form != "planes" or config.axes != 2]
    return {
        "forward": {form: partial(infer, form) for form in forms},
        "update": {form: partial(update, form) for form in forms},
    }


def report(
    case: dict[str, object], candidates: Mapping[str, Callable[[], object]], repeats: int
) -> list[dict[str, object]]:
    """Measure and print; one row for every candidate."""
    seconds = compare(candidates, CPU, repeats)
    columns = "  ".join(
        f"{name} {1e3 * value:8.2f} ({value / seconds['ours']:5.2f})" for name, value in seconds.items()
    )
    print(f"{case['subject']:11} {case['case']:14} {case['pass']:16} ms (against ours): {columns}", flush=True)
    return [
        {**case, "form": name, "milliseconds": 1e3 * value, "over_ours": value / seconds["ours"], "repeats": repeats}
        for name, value in seconds.items()
    ]


def split_commas(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument(
        "--repeats", default=3, type=int, help="of a whole model; a convolution alone has three times as many"
    )
    parser.add_argument("--cases", default=list(cases()), type=split_commas)
    parser.add_argument("--grids", default=["4096", "85x85", "64x64", "16x16x16"], type=split_commas)
    parser.add_argument("--system", action="store_true", help="freed memory goes back to the system")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keeps_memory = not args.system and keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    source = {"precision": "float32", "seed": SEED, "memory": "kept" if keeps_memory else "system", **provenance(CPU)}
    print(f"{source['machine']}, torch {source['torch']}, freed memory: {source['memory']}", flush=True)

    def save(rows: list[dict[str, object]]) -> None:
        if args.out:
            append_rows(args.out, [{"benchmark": "cpu", **row, **source} for row in rows])

    for text in args.grids:
        grid = tuple(int(points) for points in text.split("x"))
        channels = 128 if text == "64x64" else 64
        for kernel in (3, 5):
            case_facts = {"subject": "convolution", "case": f"{text}x{channels}, {kernel}", "kernel": kernel}
            for name, candidates in convolution_passes(grid, channels, kernel).items():
                save(report({**case_facts, "pass": name}, candidates, 3 * args.repeats))
    for case in args.cases:
        batch, config = cases()[case]
        case_facts = {"subject": "model", "case": case, "size": "x".join(map(str, (batch, *config.grid)))}
        for name, candidates in model_passes(batch, config).items():
            save(report({**case_facts, "pass": name}, candidates, args.repeats))


if __name__ == "__main__":
    main()
