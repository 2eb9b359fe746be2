"""Simulators of the benchmark data: five tasks and a small demo, each a set of parameters."""

from __future__ import annotations

from sigmasolver.settings import lookup
from sigmasolver.simulate.darcy import Darcy
from sigmasolver.simulate.simulator import Simulator
from sigmasolver.simulate.smoke import SMOKE3D, Smoke
from sigmasolver.simulate.turbulence import IT3D, Turbulence
from sigmasolver.simulate.vorticity import DEMO, KF2D, NS2D, Vorticity

__all__ = ["SIMULATORS", "Darcy", "Simulator", "Smoke", "Turbulence", "Vorticity", "simulator_of"]

SIMULATORS: dict[str, Simulator] = {
    "darcy": Darcy(),
    "ns2d": NS2D,
    "kf2d": KF2D,
    "it3d": IT3D,
    "smoke3d": SMOKE3D,
    "demo": DEMO,
}


def simulator_of(task: str) -> Simulator:
    """Return the simulator of this task's data, with the paper's parameters."""
    return lookup(SIMULATORS, task, "simulator")
