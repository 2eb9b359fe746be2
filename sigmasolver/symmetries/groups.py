"""The symmetries of the benchmark tasks by name, and those that users register."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sigmasolver.data.header import Header
from sigmasolver.plugins import Registry
from sigmasolver.simulate.vorticity import NS2D, Vorticity
from sigmasolver.symmetries.maps import Isometry, SymmetryGroup, Translation, refuse_unknown_vectors
from sigmasolver.tasks import TASKS, VELOCITY, Task

__all__ = ["SYMMETRIES", "refuse_unsuitable", "register_symmetries", "symmetries_of"]


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


def _all_shifts(axes: int) -> SymmetryGroup:
    """All shifts of a periodic box."""
    lines = tuple(tuple(int(a == b) for b in range(axes)) for a in range(axes))
    return SymmetryGroup((Isometry(lines),), tuple(map(Translation, lines)), periodic=True)


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
        "shifts-1d": _all_shifts(1),
        "shifts-2d": _all_shifts(2),
        "shifts-3d": _all_shifts(3),
        "square": SymmetryGroup(_signed_permutations(2)),
        "periodic-square": replace(_all_shifts(2), isometries=_signed_permutations(2)),
        "periodic-cube": replace(_all_shifts(3), isometries=_signed_permutations(3)),
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
    """The symmetries that a task names, or those of the benchmark task whose fields and normaliser it has; raises
    ValueError if none are known."""
    name, benchmark = task.symmetries, TASKS.get(task.name)
    facts = ("inputs", "targets", "steady", "normaliser")
    if name is None and benchmark and all(getattr(task, fact) == getattr(benchmark, fact) for fact in facts):
        name = OF_BENCHMARKS.get(task.name)
    if name is None:
        raise ValueError(
            f"No symmetries of the task {task.name} are known; train with --set task.symmetries=NAME, one of "
            f"{', '.join(SYMMETRIES.names())} or your own (register_symmetries)."
        )
    return SYMMETRIES.find(name)


def refuse_unsuitable(group: SymmetryGroup, task: Task, header: Header, space_stride: int) -> None:
    """Raise ValueError if data of a task do not have these symmetries, as far as they tell: by their axes, boundaries,
    points and fields, and, if they are simulated, their forcing."""
    layout = header.layout
    group.on([-(-points // space_stride) for points in header.grid])
    fields, turns = tuple(dict.fromkeys((*task.inputs, *task.targets))), len(group.isometries) > 1
    if turns:
        refuse_unknown_vectors(fields, group.axes, task.vectors)
    if turns and VELOCITY[0] in fields and layout.axis_names != ("x", "y", "z")[: group.axes]:
        raise ValueError(
            f"Symmetries need velocity_x along the first axis, ..., but the axes of these data are "
            f"{', '.join(layout.axis_names)}; transpose the data, or omit the symmetries."
        )
    for name, boundary, coordinates in zip(layout.axis_names, layout.boundary, layout.coordinates, strict=True):
        if (boundary == "periodic") != group.periodic:
            raise ValueError(
                f"These symmetries are those of a box that is {'' if group.periodic else 'not '}periodic, but the axis "
                f"{name} of the data is {boundary}; set task.symmetries to others, or state the boundary of the data."
            )
        opposite_sums = coordinates + coordinates[::-1]  # twice the centre, if the points are symmetric
        if not group.periodic and (
            (len(coordinates) - 1) % space_stride or not np.allclose(opposite_sums, opposite_sums[0], rtol=1e-6)
        ):
            raise ValueError(
                f"The points of axis {name} are not symmetric about its centre (every {space_stride} of "
                f"{len(coordinates)} is used), but a reflection exchanges its ends; use a stride that keeps both ends."
            )
    _refuse_other_forcing(group, header)


def _refuse_other_forcing(group: SymmetryGroup, header: Header) -> None:
    """Raise ValueError if these data are a simulated flow whose forcing the group does not leave unchanged."""
    names = ("forcing_wave", "forcing_cosine", "forcing_sine", "grid")
    if header.source != Vorticity.name or any(name not in header.parameters for name in names):
        return
    wave, cosine, sine, points = (header.parameters[name] for name in names)
    flow = replace(NS2D, grid=points, stored=points, forcing_wave=tuple(wave), forcing_cosine=cosine, forcing_sine=sine)
    symmetries, translations = group.on((points, points)), len(group.translations)
    isometries = symmetries.first(len(group.isometries))
    steps = torch.cat((torch.zeros(translations, 1), torch.eye(translations)), dim=1).long()
    rows = torch.cat((isometries, steps))
    forcing = flow.forcing()[None, None, ..., None].expand(len(rows), -1, -1, -1, -1)
    change = symmetries.apply(forcing, ("vorticity",), rows) - forcing
    if float(change.abs().amax()) > 1e-9 * float(forcing.abs().amax()):
        raise ValueError(
            f"The forcing of these data ({wave[0]} and {wave[1]} waves along x and y, cosine {cosine}, sine {sine}) "
            "does not have these symmetries; set task.symmetries to those it has, or omit train.augment and "
            "--symmetries."
        )
