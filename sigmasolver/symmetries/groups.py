"""The symmetries of the benchmark tasks by name, and those that users register."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from sigmasolver.data.header import Header
from sigmasolver.plugins import Registry
from sigmasolver.simulate.vorticity import NS2D, Vorticity
from sigmasolver.symmetries.maps import Isometry, SymmetryGroup, Translation
from sigmasolver.tasks import Task

__all__ = ["SYMMETRIES", "refuse_other_forcing", "register_symmetries", "symmetries_of"]


def _signed_permutations(axes: int) -> tuple[Isometry, ...]:
    """All isometries of a square or a cube, the identity first."""
    return tuple(
        Isometry(
            tuple(
                tuple(sign * (column == source) for column in range(axes))
                for source, sign in zip(order, signs, strict=True)
            )
        )
        for order in itertools.permutations(range(axes))
        for signs in itertools.product((1, -1), repeat=axes)
    )


IDENTITY = ((1, 0), (0, 1))
HALF_TURN = ((-1, 0), (0, -1))


def _kolmogorov(waves: int) -> SymmetryGroup:
    """Flow on a torus driven by cos(2π waves y) in the vorticity equation: a reflection changes the sign of the
    vorticity, and a shift by half a wave that of the forcing."""
    half_wave = (0.0, 0.5 / waves)
    return SymmetryGroup(
        (
            Isometry(IDENTITY),
            Isometry(HALF_TURN),
            Isometry(((-1, 0), (0, 1)), half_wave),
            Isometry(((1, 0), (0, -1)), half_wave),
        ),
        (Translation((1, 0)), Translation((0, 1), waves)),
        periodic=True,
    )


DIAGONAL = SymmetryGroup(
    (
        Isometry(IDENTITY),
        Isometry(HALF_TURN, (0.25, 0.0)),
        Isometry(((0, 1), (1, 0)), (0.5, 0.0)),
        Isometry(((0, -1), (-1, 0)), (0.75, 0.0)),
    ),
    (Translation((1, -1)),),
    periodic=True,
)
"""NS2D, driven by cos(2πz) + sin(2πz) with z = x + y: the same for 1/4 - z, and the opposite for z + 1/2."""


def _check_group(name: str, group: Any) -> SymmetryGroup:
    if not isinstance(group, SymmetryGroup):
        raise ValueError(f'The symmetries "{name}" must be a SymmetryGroup, not {type(group).__name__}.')
    return group


SYMMETRIES: Registry[SymmetryGroup] = Registry(
    "symmetry group",
    {
        "square": SymmetryGroup(_signed_permutations(2)),
        "periodic-cube": SymmetryGroup(
            _signed_permutations(3),
            (Translation((1, 0, 0)), Translation((0, 1, 0)), Translation((0, 0, 1))),
            periodic=True,
        ),
        "upright-box": SymmetryGroup(
            (Isometry(((1, 0, 0), (0, 1, 0), (0, 0, 1))), Isometry(((0, 1, 0), (1, 0, 0), (0, 0, 1))))
        ),
        "kolmogorov-4": _kolmogorov(4),
        "kolmogorov-8": _kolmogorov(8),
        "diagonal-forcing": DIAGONAL,
    },
    "sigmasolver.symmetries",
    _check_group,
    "sigmasolver.symmetries.register_symmetries",
)
"""By name. The box of smoke is only mirrored across its diagonal, because its velocity lies on lower faces."""
OF_BENCHMARKS = {
    "darcy": "square",
    "ns2d": "diagonal-forcing",
    "kf2d": "kolmogorov-8",
    "demo": "kolmogorov-4",
    "it3d": "periodic-cube",
    "smoke3d": "upright-box",
}


def register_symmetries(name: str, group: SymmetryGroup) -> None:
    """Register the symmetries of your own task by name, for use as `task.symmetries` in recipes.

    Args:
        name: letters, digits, dots, hyphens and underscores; it must not be taken.
        group: symmetries of the equation, its parameters, its boundary conditions and the distribution of the data.

    Example:
        >>> import sigmasolver
        >>> from sigmasolver.symmetries import Isometry, SymmetryGroup, register_symmetries
        >>> mirror = SymmetryGroup((Isometry(((1, 0), (0, 1))), Isometry(((1, 0), (0, -1)))))
        >>> register_symmetries("mirror-y", mirror)
        >>> sigmasolver.recipe_of("darcy", settings=["task.symmetries=mirror-y"]).task.symmetries
        'mirror-y'
    """
    SYMMETRIES.register(name, group)


def symmetries_of(task: Task) -> SymmetryGroup:
    """The symmetries of a task; raises ValueError if none are known."""
    name = task.symmetries or OF_BENCHMARKS.get(task.name)
    if name is None:
        raise ValueError(
            f"No symmetries of the task {task.name} are known; set task.symmetries to one of "
            f"{', '.join(SYMMETRIES.names())}, or to your own (register_symmetries)."
        )
    return SYMMETRIES.find(name)


def refuse_other_forcing(group: SymmetryGroup, header: Header) -> None:
    """Raise ValueError if these data are a simulated flow whose forcing the group does not leave unchanged. Other data
    do not state their forcing."""
    names = ("forcing_wave", "forcing_cosine", "forcing_sine")
    if header.source != Vorticity.name or any(name not in header.parameters for name in names):
        return
    wave, cosine, sine = (header.parameters[name] for name in names)
    points = header.grid[0]
    flow = replace(NS2D, grid=points, stored=points, forcing_wave=tuple(wave), forcing_cosine=cosine, forcing_sine=sine)
    symmetries = group.on(header.grid)
    rows = torch.zeros(len(group.isometries) + len(group.translations), 1 + len(group.translations), dtype=torch.int64)
    rows[: len(group.isometries), 0] = torch.arange(len(group.isometries))
    rows[len(group.isometries) :, 1:] = torch.eye(len(group.translations), dtype=torch.int64)
    forcing = flow.forcing()[None, None, ..., None].expand(len(rows), -1, -1, -1, -1)
    change = symmetries.apply(forcing, ("vorticity",), rows) - forcing
    if float(change.abs().amax()) > 1e-9 * float(forcing.abs().amax()):
        raise ValueError(
            f"The forcing of these data ({wave[0]} and {wave[1]} waves along x and y, cosine {cosine}, sine {sine}) "
            "does not have these symmetries; set task.symmetries to those it has, or omit train.augment and "
            "--symmetries."
        )
