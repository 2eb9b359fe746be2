"""Time and statistics of the simulators, compared with the public data sets.

    python benchmarks/simulate.py                                            # small counts, coarser where needed
    python benchmarks/simulate.py --device cuda --out results/simulate.jsonl # the counts of the targets

The time of a set covers everything from the seed to float32 trajectories on the device: random draws, compilation,
integration. Statistics are means over the trajectories of the set; "expected" values are from prototypes of the
published generators, or from the public files, for a few trajectories.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measure import append_rows

from sigmasolver.runs import provenance
from sigmasolver.simulate import SIMULATORS, Simulator
from sigmasolver.simulate.turbulence import IT3D
from sigmasolver.simulate.vorticity import DEMO, KF2D, NS2D

SEED = 0
Measures = dict[str, torch.Tensor]


def deviation(x: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each trajectory (first axis)."""
    return x.double().flatten(1).std(1)


def peak(x: torch.Tensor) -> torch.Tensor:
    return x.abs().flatten(1).amax(1).double()


def change(x: torch.Tensor, frame: int, step: int = 1) -> torch.Tensor:
    """Relative change of all fields between two frames."""
    before, after = x[:, frame].double().flatten(1), x[:, frame + step].double().flatten(1)
    out: torch.Tensor = (after - before).norm(dim=1) / before.norm(dim=1)
    return out


def darcy(x: torch.Tensor) -> Measures:
    coefficient, pressure = x[:, 0, ..., 0], x[:, 0, ::5, ::5, 1]
    return {
        "coefficient mean": coefficient.double().flatten(1).mean(1),
        "coefficient std": deviation(coefficient),
        "pressure mean (85²)": pressure.double().flatten(1).mean(1),
        "pressure std (85²)": deviation(pressure),
        "pressure max": peak(pressure),
    }


def ns2d(x: torch.Tensor) -> Measures:
    stds = {f"std at t={t}": deviation(x[:, t - 1]) for t in (1, 5, 10, 15, 20)}
    return {**stds, "max at t=20": peak(x[:, 19]), "mean of stored points": x[:, 19].double().flatten(1).mean(1).abs()}


def kf2d(x: torch.Tensor) -> Measures:
    y = 2 * math.pi * torch.arange(x.shape[3], device=x.device, dtype=torch.float64) / x.shape[3]
    profile = x[..., 0].double().mean((1, 2))
    return {
        "std": deviation(x),
        "temporal std": x[..., 0].std(1).double().mean((1, 2)),
        "max": peak(x),
        "cos 8y of the mean": 2 * (profile * torch.cos(8 * y)).mean(1),
        "change in 1/16": change(x, 30, 2),
    }


def taylor_reynolds(velocity: torch.Tensor, viscosity: float) -> torch.Tensor:
    """sqrt(20 E² / (3 ν ε)) of velocities (B, n, n, n, 3) in a box of side 2π."""
    spectrum = torch.fft.fftn(velocity.double(), dim=(1, 2, 3), norm="forward").abs().square().sum(-1)
    k = torch.fft.fftfreq(velocity.shape[1], 1 / velocity.shape[1], dtype=torch.float64, device=velocity.device)
    squared = k[:, None, None] ** 2 + k[:, None] ** 2 + k**2
    energy = spectrum.sum((1, 2, 3)) / 2
    dissipation = viscosity * (squared * spectrum).sum((1, 2, 3))
    return torch.sqrt(20 * energy**2 / (3 * viscosity * dissipation))


def it3d(x: torch.Tensor) -> Measures:
    last, viscosity = x.shape[1] - 1, IT3D.viscosity
    measures = {"velocity rms": x[:, last, ..., 1:].double().square().flatten(1).mean(1).sqrt()}
    for frame in (0, 9, last):
        if frame <= last:
            measures[f"Re_λ at t={0.05 * (frame + 1):.2f}"] = taylor_reynolds(x[:, frame, ..., 1:], viscosity)
    measures |= {
        "head std, first frame": deviation(x[:, 0, ..., 0]),
        "largest velocity, first frame": peak(x[:, 0, ..., 1:]),
    }
    if last == 19:
        measures |= {"head std, last frame": deviation(x[:, last, ..., 0])}
        measures |= {"change, last frames": change(x[..., 1:], last - 1)}
    return measures


def smoke3d(x: torch.Tensor) -> Measures:
    return {
        "density mean": x[..., 0].double().flatten(1).mean(1),
        "density std": deviation(x[..., 0]),
        "velocity std": deviation(x[..., 1:]),
        "largest velocity, first frame": peak(x[:, 0, ..., 1:]),
        "largest velocity, last frame": peak(x[:, -1, ..., 1:]),
    }


@dataclass(frozen=True)
class Set:
    measures: Callable[[torch.Tensor], Measures]
    count: int
    seconds: float
    """Target time on one H200; for the demo on two CPU cores."""
    small: Simulator
    """A smaller simulator that takes about half a minute on a CPU."""
    small_count: int
    expected: dict[str, str]


SETS = {
    "darcy": Set(
        darcy, 1200, 6, SIMULATORS["darcy"], 8,
        {"coefficient mean": "7.3-7.5", "coefficient std": "4.5", "pressure mean (85²)": "5.7e-3",
         "pressure std (85²)": "3.9e-3", "pressure max": "1.7e-2 at most"},
    ),
    "ns2d": Set(
        ns2d, 1200, 150, replace(NS2D, grid=64, step=4e-3), 8,
        {"std at t=1": "0.35", "std at t=5": "0.64", "std at t=10": "1.07", "std at t=15": "1.44",
         "std at t=20": "1.72", "max at t=20": "3.6-3.9", "mean of stored points": "0"},
    ),
    "kf2d": Set(
        kf2d, 120, 60, replace(KF2D, grid=128, stored=128, step=1 / 256), 4,
        {"std": "6.0±0.2", "temporal std": "5.2", "max": "30", "cos 8y of the mean": "-2.4", "change in 1/16": "0.26"},
    ),
    "it3d": Set(
        it3d, 50, 25, replace(IT3D, frames=2), 2,
        {"velocity rms": "1.2641", "Re_λ at t=0.05": "33", "Re_λ at t=0.50": "66", "Re_λ at t=1.00": "79",
         "head std, first frame": "2.55", "head std, last frame": "2.0", "largest velocity, first frame": "21",
         "change, last frames": "0.27"},
    ),
    "smoke3d": Set(
        smoke3d, 50, 3, SIMULATORS["smoke3d"], 4,
        {"density mean": "0.758", "density std": "0.530", "velocity std": "0.253",
         "largest velocity, first frame": "2.6 at most",
         "largest velocity, last frame": "1.1 at most"},
    ),
    "demo": Set(lambda x: {"std": deviation(x), "change of last frames": change(x, 18)}, 64, 60, DEMO, 64, {}),
}  # fmt: skip


def make(
    simulator: Simulator, count: int, measures: Callable[[torch.Tensor], Measures], device: torch.device
) -> tuple[float, Measures]:
    """Simulate; return the seconds, and every measure for every trajectory."""
    seconds, batch, batches = 0.0, simulator.batch_size(device), []
    for first in range(0, count, batch):
        start = time.perf_counter()
        x = simulator.simulate(SEED, range(first, min(count, first + batch)), device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        batches.append({name: values.cpu() for name, values in measures(x).items()})
    return seconds, {name: torch.cat([values_of_batch[name] for values_of_batch in batches]) for name in batches[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(SETS), metavar="TASK", help=", ".join(SETS))
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := [task for task in arguments.tasks if task not in SETS]:
        parser.error(f"there is no set {unknown[0]}; choose from {', '.join(SETS)}")
    device, full = arguments.device, arguments.device.type == "cuda"
    source = provenance(device)
    print(f"{source['machine']}, torch {source['torch']}, seed {SEED}")
    for task in arguments.tasks:
        data_set = SETS[task]
        simulator, count = (SIMULATORS[task], data_set.count) if full else (data_set.small, data_set.small_count)
        seconds, measured = make(simulator, count, data_set.measures, device)
        target = data_set.seconds if full or task == "demo" else None
        target_text = "" if target is None else f" (target {target:g} s)"
        print(f"\n{task}: {count} trajectories in {seconds:.2f} s{target_text}   {simulator}", flush=True)
        print(f"  {'':30}{'mean':>11}{'std over set':>14}   expected")
        shared = {"benchmark": "simulate", "task": task, "count": count, "seed": SEED, "simulator": repr(simulator)}
        rows = [{**shared, "metric": "seconds", "value": seconds, "target": target, **source}]
        for name, values in measured.items():
            mean, spread, expected = values.mean().item(), values.std().item(), data_set.expected.get(name, "")
            print(f"  {name:30}{mean:11.4g}{spread:14.2g}   {expected}", flush=True)
            rows.append({**shared, "metric": name, "value": mean, "spread": spread, "expected": expected, **source})
        if arguments.out:
            append_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
