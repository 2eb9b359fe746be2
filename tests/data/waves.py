"""A tiny simulator for the tests: decaying, drifting waves with an exact solution.

    u(x, t) = Σ_m a_m exp(-ν|k_m|² t) cos(k_m·(x - ct) + φ_m)      and its derivative along x,

on the periodic square of side 2π; c is the drift, ν the viscosity, k_m integer wavenumbers.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as endless
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch

from sigmasolver.data.layout import Layout
from sigmasolver.data.store import open_store
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.simulator import Simulator, Tick, generator


@dataclass(frozen=True)
class Waves(Simulator):
    grid: int = 12
    frames: int = 5
    viscosity: float = 0.05
    drift: tuple[float, float] = (1.0, -0.5)
    modes: int = 3
    batch: int = 3

    name: ClassVar[str] = "waves"

    @property
    def layout(self) -> Layout:
        points = np.arange(self.grid) * (2 * np.pi / self.grid)
        times = 0.25 * np.arange(1, self.frames + 1)
        return Layout(("height", "slope"), ("m", "1"), ("periodic", "periodic"), (points, points), times)

    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        batch = []
        for done, index in enumerate(indices, 1):
            batch.append(torch.from_numpy(self.exact(seed, index)).to(torch.float32))
            if tick is not None:
                tick(done / len(indices))
        return torch.stack(batch).to(device)

    def exact(self, seed: int, index: int) -> np.ndarray:
        """Exact solution in float64."""
        random = generator(self.name, seed, index)
        a, phase = torch.rand((2, self.modes), generator=random, dtype=torch.float64).numpy()
        k = torch.randint(1, 4, (2, self.modes), generator=random).numpy()
        x, y = self.layout.coordinates
        t = self.layout.times[:, None, None, None]
        angle = (
            k[0] * (x[:, None, None] - self.drift[0] * t)
            + k[1] * (y[None, :, None] - self.drift[1] * t)
            + 2 * np.pi * phase
        )
        decayed = a * np.exp(-self.viscosity * (k**2).sum(0) * t)
        u, slope = decayed * np.cos(angle), -decayed * k[0] * np.sin(angle)
        return np.stack([u.sum(-1), slope.sum(-1)], axis=-1)

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        return self.batch


# --- killing a generation


def die_at_line(number: int) -> None:
    """Kill this process before the `number`-th line that it runs of the store modules, in any thread."""
    remaining = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal remaining
        if not frame.f_code.co_filename.endswith(("data/store.py", "data/slots.py")):
            return None
        if event == "line":
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def die_at_write(number: int) -> None:
    """Kill this process half-way through its `number`-th write."""
    full_write, remaining = os.pwrite, number

    def half_write(fd: int, data: Any, offset: int) -> int:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            full_write(fd, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return full_write(fd, data, offset)

    os.pwrite = half_write


def kill_everywhere(where: str, folder: str, count: int, seed: int, before: int, step: int) -> list[int]:
    """Generate in forks that are killed at moment 1, 1 + step, …, each in its own folder, until one survives.

    `before` trajectories exist already. Returns the moments of the kills.
    """
    killed_at: list[int] = []
    for moment in endless(1, step):
        path = os.path.join(folder, str(moment), "waves.h5")
        if before:
            generate(Waves(), before, seed, path)
        child = os.fork()
        if child == 0:
            {"line": die_at_line, "write": die_at_write}[where](moment)
            generate(Waves(), count, seed, path)
            os._exit(0)
        if not killed(child):
            break
        killed_at.append(moment)
    return killed_at


def kill_at_random(path: str, simulator: Waves, count: int, kills: int) -> list[int]:
    """Kill a generation `kills` times after a random delay; return the complete trajectories after each kill."""
    rng, complete = random.Random(0), [0]
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            generate(simulator, count, 0, path)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        killed(child)
        if os.path.exists(path):
            with open_store(path) as reader:
                assert all(reader.verify(index) for index in range(len(reader)))
                complete.append(len(reader))
    return complete


def killed(child: int) -> bool:
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0
