"""Thin matrix products compared with the FFT, for the spectral operator alone and for the full model, in one run.

    python benchmarks/spectral.py [--device cuda] [--repeats 7] [--out results/spectral.jsonl]

The sizes are those of the paper's five canonical tasks. On a CPU the batch is one and the three-dimensional models
have a single block, to limit the time; only the ratios matter. float32, TF32 off, eager, seed 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from measure import append_rows, compare

from sigmasolver.models import build_model
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops.fourier import axis_fourier, axis_fourier_rfft
from sigmasolver.runs import provenance

FORMS = {"gemm": axis_fourier, "rfft": axis_fourier_rfft}
SEED = 0


@dataclass(frozen=True)
class Case:
    task: str
    batch: int
    grid: tuple[int, ...]
    in_channels: int
    out_channels: int
    width: int
    modes: int


CASES = (
    Case("darcy", 4, (85, 85), 1, 1, 128, 4),
    Case("ns2d", 2, (64, 64), 10, 1, 256, 4),
    Case("kf2d", 8, (128, 128), 10, 4, 128, 8),
    Case("it3d", 2, (60, 60, 60), 40, 8, 128, 6),
    Case("smoke3d", 1, (64, 64, 64), 16, 16, 128, 6),
)


def passes(
    forward: Callable[[str], torch.Tensor], parameters: list[torch.Tensor]
) -> dict[str, dict[str, Callable[[], object]]]:
    """The candidates in both forms: forward only, and forward with all gradients."""

    def infer(form: str) -> object:
        with torch.inference_mode():
            return forward(form)

    def backward(form: str) -> object:
        return torch.autograd.grad(forward(form).square().mean(), parameters)

    return {
        "forward": {form: partial(infer, form) for form in FORMS},
        "forward+backward": {form: partial(backward, form) for form in FORMS},
    }


def operator_case(case: Case, batch: int, device: torch.device) -> dict[str, dict[str, Callable[[], object]]]:
    width = case.width // 2
    V = torch.randn(batch, *case.grid, width, device=device, requires_grad=True)
    weights = [0.02 * torch.randn(case.modes, width, width, 2, device=device) for _ in case.grid]
    weights = [weight.requires_grad_() for weight in weights]
    return passes(lambda form: FORMS[form](V, weights), [V, *weights])


def model_case(case: Case, batch: int, depth: int, device: torch.device) -> dict[str, dict[str, Callable[[], object]]]:
    model = build_model(
        "transolver-sigma",
        grid=case.grid,
        in_channels=case.in_channels,
        out_channels=case.out_channels,
        width=case.width,
        depth=depth,
        modes=case.modes,
    ).to(device)
    x = torch.randn(batch, *case.grid, case.in_channels, device=device)

    def forward(form: str) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, SpectralOperator):
                module.operator = FORMS[form]
        out: torch.Tensor = model(x)
        return out

    return passes(forward, list(model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, on_cpu = arguments.device, arguments.device.type == "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    source = provenance(device)
    print(f"{source['machine']}, torch {source['torch']}, float32, median of {arguments.repeats}")
    print(f"{'subject':9} {'case':22} {'pass':17} {'rfft ms':>9} {'gemm ms':>9} {'rfft/gemm':>9}")
    for case in CASES:
        torch.manual_seed(SEED)
        batch = 1 if on_cpu else case.batch
        depth = 1 if on_cpu and len(case.grid) == 3 else 8
        subjects = {
            "operator": partial(operator_case, case, batch, device),
            "model": partial(model_case, case, batch, depth, device),
        }
        for subject, make in subjects.items():
            for name, candidates in make().items():
                times = compare(candidates, device, arguments.repeats)
                ratio = times["rfft"] / times["gemm"]
                size = "x".join(map(str, (batch, *case.grid)))
                columns = f"{1e3 * times['rfft']:9.2f} {1e3 * times['gemm']:9.2f} {ratio:9.2f}"
                print(f"{subject:9} {case.task + ' ' + size:22} {name:17} {columns}", flush=True)
                row: dict[str, object] = {"benchmark": "spectral", "subject": subject, "task": case.task, "pass": name}
                row |= {"size": size, "width": case.width, "modes": case.modes, "depth": depth}
                row |= {"rfft_s": times["rfft"], "gemm_s": times["gemm"], "rfft_over_gemm": ratio}
                row |= {"precision": "float32", "seed": SEED, "repeats": arguments.repeats, **source}
                if arguments.out:
                    append_rows(arguments.out, [row])


if __name__ == "__main__":
    main()
