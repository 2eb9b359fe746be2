"""Groups of maps of a box, or of a grid, to itself that turn solutions into solutions.

    (g u)(x) = R u(A x + s),    solution operator S:  S(g u) = g S(u)

A is a signed permutation of the axes, s a shift. R acts on the fields: a scalar keeps its value, the vorticity of a
plane flow is multiplied by det A, and the components of a velocity become A^T u. Translations along which the equation
does not change are shifts of their own. A transformed window is another window of the same equation (training:
`train.augment`), and a forecast of transformed frames, transformed back, is another forecast of the same flow
(`forecast/symmetric.py`).

A symmetry of a grid is a row (number of the isometry, number of steps along each translation) of integers, so a batch
of them lies on the device and a captured step can read a new one each time. Frames are moved by one gather: values are
not rounded.

Letters: B batch, T frames, N points, d axes, q fields, K translations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sigmasolver.sampling import hashed_seed
from sigmasolver.tasks import VELOCITY, velocity_in

__all__ = ["GridSymmetries", "Isometry", "SymmetryGroup", "Translation", "refuse_unknown_vectors"]

PSEUDOSCALARS = ("vorticity", "stream_function", "streamfunction")
"""Fields that change sign under a reflection of the plane; other fields are scalars."""
Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Isometry:
    """x -> A x + s."""

    matrix: Matrix
    """A: one 1 or -1 in each row and column."""
    shift: tuple[float, ...] = ()
    """s in sides of the box; empty: none."""


@dataclass(frozen=True)
class Translation:
    """Shifts by multiples of a step."""

    direction: tuple[int, ...]
    """Steps along each axis."""
    parts: int | None = None
    """Steps in a side of the box; none: one for each grid point."""

    def __post_init__(self) -> None:
        if not any(self.direction):
            raise ValueError("A translation needs a direction that is not zero along every axis.")
        if self.parts is not None and self.parts < 1:
            raise ValueError(f"parts of a translation is {self.parts}; it must be at least 1.")


@dataclass(frozen=True)
class SymmetryGroup:
    """Isometries, the first of which is the identity, combined with translations.

    Args:
        isometries: one of each class of symmetries that differ by a translation.
        translations: independent ones.
        periodic: whether the box is periodic along every axis; otherwise it is along none, and a reflection exchanges
            its sides.

    Example:
        >>> from sigmasolver.symmetries import Isometry, SymmetryGroup, Translation
        >>> shear = SymmetryGroup(  # the same at every x, and after a half turn
        ...     (Isometry(((1, 0), (0, 1))), Isometry(((-1, 0), (0, -1)))), (Translation((1, 0)),), periodic=True
        ... )
        >>> len(shear.on((64, 32)))
        128
    """

    isometries: tuple[Isometry, ...]
    translations: tuple[Translation, ...] = ()
    periodic: bool = False

    def __post_init__(self) -> None:
        axes = len(self.isometries[0].matrix) if self.isometries else 0
        identity = tuple(tuple(int(a == b) for b in range(axes)) for a in range(axes))
        if not axes or self.isometries[0] != Isometry(identity):
            raise ValueError("The first isometry of a symmetry group must be the identity, without a shift.")
        for isometry in self.isometries:
            entries = [[abs(entry) for entry in line] for line in isometry.matrix]
            if sorted(entries) != sorted([list(line) for line in identity]):
                raise ValueError(
                    f"The matrix {isometry.matrix} is not a signed permutation of {axes} axes: it needs one 1 or -1 in "
                    "each row and column, and zeros elsewhere."
                )
            if isometry.shift and (len(isometry.shift) != axes or not self.periodic):
                raise ValueError(
                    f"The shift {isometry.shift} needs one number for each of {axes} axes of a periodic box."
                )
        for translation in self.translations:
            if len(translation.direction) != axes or not self.periodic:
                raise ValueError(
                    f"The translation {translation.direction} needs one number for each of {axes} axes of a periodic "
                    "box."
                )

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return len(self.isometries[0].matrix)

    def on(self, grid: Sequence[int]) -> GridSymmetries:
        """The symmetries of a grid; raises ValueError if the group does not map it to itself."""
        return GridSymmetries(self, tuple(grid))


class _Tables(NamedTuple):
    """Isometries on one device, and their action on some fields."""

    matrices: torch.Tensor
    """A: (isometries, d, d)"""
    offsets: torch.Tensor
    """s in grid points: (isometries, d)"""
    steps: torch.Tensor
    """A step along each translation: (K, d)"""
    channels: torch.Tensor
    """Channel that each field is taken from: (isometries, q)"""
    signs: torch.Tensor
    """Its sign: (isometries, q)"""
    channels_back: torch.Tensor
    signs_back: torch.Tensor
    """The same for the inverse."""


@dataclass(frozen=True)
class GridSymmetries:
    """The symmetries of a group on a grid, as rows of 1 + K integers."""

    group: SymmetryGroup
    grid: tuple[int, ...]
    _tables: dict[tuple[torch.device, tuple[str, ...]], _Tables] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        group, grid = self.group, self.grid
        if len(grid) != group.axes:
            raise ValueError(f"These symmetries are those of {group.axes} axes, but the grid has {len(grid)}.")
        for isometry in group.isometries:
            for points, line in zip(grid, isometry.matrix, strict=True):
                other = grid[[abs(entry) for entry in line].index(1)]
                if other != points:
                    raise ValueError(
                        f"A symmetry exchanges axes of {points} and {other} points; it needs as many points along both."
                    )
            self._offset(isometry)
        for translation in group.translations:
            self._step(translation)

    def __len__(self) -> int:
        """Number of symmetries."""
        return len(self.group.isometries) * math.prod(self.counts())

    def counts(self) -> list[int]:
        """Number of different steps along each translation."""
        return [
            math.lcm(*(points // math.gcd(points, step) for points, step in zip(self.grid, steps, strict=True)))
            for steps in map(self._step, self.group.translations)
        ]

    def random(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """`count` uniformly drawn symmetries: int64 (count, 1 + K), on the CPU."""
        sizes = (len(self.group.isometries), *self.counts())
        return torch.stack([torch.randint(size, (count,), generator=generator) for size in sizes], dim=1)

    def first(self, count: int) -> torch.Tensor:
        """`count` different symmetries, always the same: the identity, then every isometry, then isometries with
        random translations."""
        isometries = len(self.group.isometries)
        if not 1 <= count <= len(self):
            raise ValueError(
                f"This grid has {len(self)} symmetries; choose a number from 1 to {len(self)}, not {count}."
            )
        rows = torch.zeros(min(count, isometries), 1 + len(self.group.translations), dtype=torch.int64)
        rows[:, 0] = torch.arange(len(rows))
        generator = torch.Generator().manual_seed(hashed_seed("symmetries"))
        while len(rows) < count:
            new = self.random(1, generator)
            new[0, 0] = len(rows) % isometries
            if not bool((rows == new).all(1).any()):
                rows = torch.cat((rows, new))
        return rows

    def apply(self, frames: torch.Tensor, fields: tuple[str, ...], rows: torch.Tensor) -> torch.Tensor:
        """g u for frames (B, T, *grid, q) and symmetries (B, 1 + K), one per sample."""
        tables, isometry = self._on(rows.device, fields), rows[:, 0]
        return self._move(
            frames,
            tables.matrices[isometry],
            self._shift(tables, rows),
            tables.channels[isometry],
            tables.signs[isometry],
        )

    def undo(self, frames: torch.Tensor, fields: tuple[str, ...], rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `apply`: x -> A^T (x - s)."""
        tables, isometry = self._on(rows.device, fields), rows[:, 0]
        inverse = tables.matrices[isometry].mT
        shift = -(inverse * self._shift(tables, rows)[:, None]).sum(-1)
        return self._move(frames, inverse, shift, tables.channels_back[isometry], tables.signs_back[isometry])

    def _shift(self, tables: _Tables, rows: torch.Tensor) -> torch.Tensor:
        """s in grid points: (B, d)."""
        return tables.offsets[rows[:, 0]] + (rows[:, 1:, None] * tables.steps).sum(1)

    def _on(self, device: torch.device, fields: tuple[str, ...]) -> _Tables:
        """Tables of all isometries, kept for each device, because a captured step must not copy from the host."""
        key = (device, fields)
        if key not in self._tables:
            isometries = self.group.isometries
            matrices = torch.tensor([isometry.matrix for isometry in isometries])
            offsets = torch.tensor([self._offset(isometry) for isometry in isometries])
            steps = torch.tensor([self._step(translation) for translation in self.group.translations])
            tables = (
                matrices,
                offsets,
                steps.long().view(-1, len(self.grid)),
                *_field_maps(fields, matrices),
                *_field_maps(fields, matrices.mT),
            )
            self._tables[key] = _Tables(*(table.to(device) for table in tables))
        return self._tables[key]

    def _offset(self, isometry: Isometry) -> list[int]:
        """s in grid points; a reflection of a box with sides takes the first point to the last one."""
        if self.group.periodic:
            shift = isometry.shift or (0.0,) * len(self.grid)
            return [_whole(points, part) for points, part in zip(self.grid, shift, strict=True)]
        return [points - 1 if -1 in line else 0 for points, line in zip(self.grid, isometry.matrix, strict=True)]

    def _step(self, translation: Translation) -> list[int]:
        """One step in grid points."""
        if translation.parts is None:
            return list(translation.direction)
        return [
            _whole(points, steps / translation.parts)
            for points, steps in zip(self.grid, translation.direction, strict=True)
        ]

    def _move(
        self,
        frames: torch.Tensor,
        matrix: torch.Tensor,
        shift: torch.Tensor,
        channels: torch.Tensor,
        signs: torch.Tensor,
    ) -> torch.Tensor:
        """Signed values of frames (B, T, *grid, q) at the points A x + s and in other channels, by one gather."""
        if frames.shape[2:-1] != self.grid:
            raise ValueError(f"These are symmetries of the grid {self.grid}, got frames {tuple(frames.shape)}.")
        lines = (torch.arange(points, device=frames.device) for points in self.grid)
        points = torch.stack([axis.flatten() for axis in torch.meshgrid(*lines, indexing="ij")])  # (d, N)
        source = torch.zeros((), dtype=torch.int64, device=frames.device)
        for axis, size in enumerate(self.grid):
            along = (matrix[:, axis, :, None] * points).sum(1) + shift[:, axis, None]
            source = source * size + (along.remainder(size) if self.group.periodic else along)
        index = source[:, :, None] * frames.shape[-1] + channels[:, None]  # (B, N, q)
        flat = frames.flatten(2)
        moved = flat.gather(2, index.flatten(1)[:, None].expand_as(flat)).view(frames.shape)
        return moved * signs.to(moved.dtype).view(len(signs), *(1,) * (frames.ndim - 2), -1)


def refuse_unknown_vectors(fields: Sequence[str], axes: int, vectors: Sequence[Sequence[str]] = ()) -> None:
    """Raise ValueError if some of these fields are components of a vector that symmetries do not transform; `vectors`
    as in `Task`."""
    velocity = VELOCITY[:axes]
    stems = [match[1] for name in fields if name not in velocity and (match := re.fullmatch("(.*)[xyz]", name, re.I))]
    unknown = [name for name in fields if name in VELOCITY and not set(velocity) <= set(fields)]
    unknown += [name for vector in vectors for name in vector if name not in velocity]
    unknown += [name for name in velocity_in(fields) if name not in velocity]
    unknown += [name for name in fields if name not in velocity and stems.count(name[:-1]) > 1]
    unknown += [name for name in fields if name.startswith("vorticity") and (name != "vorticity" or axes != 2)]
    if unknown:
        raise ValueError(
            f"Symmetries transform the vector {', '.join(velocity)} along the first, second, ... axis and the "
            f"vorticity of a plane flow, but not {', '.join(dict.fromkeys(unknown))}; rename these fields, or omit the "
            "symmetries."
        )


def _field_maps(fields: tuple[str, ...], matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source channel and sign of each field for matrices (n, d, d): int64 (n, q)."""
    if len(matrix) > 1:  # shifts alone do not act on the fields
        refuse_unknown_vectors(fields, matrix.shape[-1])
    components = [fields.index(name) for name in VELOCITY if name in fields and len(matrix) > 1]
    channels = torch.arange(len(fields)).repeat(len(matrix), 1)
    signs = torch.ones_like(channels)
    for name in PSEUDOSCALARS:
        if name in fields and matrix.shape[-1] == 2:
            signs[:, fields.index(name)] = matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0]
    if components:
        # A^T u: component k of the result is the component a for which A[a, k] is not zero.
        source = (matrix.abs() * torch.arange(len(components))[:, None]).sum(1)
        channels[:, components] = torch.tensor(components)[source]
        signs[:, components] = matrix.sum(1)
    return channels, signs


def _whole(points: int, part: float) -> int:
    """`part` of a side in grid points."""
    shift = points * part
    if abs(shift - round(shift)) > 1e-6:
        raise ValueError(
            f"A symmetry shifts by {part:.4g} of a side, which is not a whole number of its {points} grid points; use "
            "another grid."
        )
    return round(shift)
