"""Sizes and options of a model as frozen dataclasses that validate themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from sigmasolver.ops.convolution import PADDINGS
from sigmasolver.ops.fourier import available_modes
from sigmasolver.settings import check_types

__all__ = ["Options", "SolverConfig", "check_grid"]

POSITIONS = ("distances", "coordinates", "proportional", "distances-proportional")
LATTICE = {1: 64, 2: 8, 3: 4}
"""Reference points per axis: 64 distances in every dimension. 8 per axis in 3-D would be 512 channels per point,
half a gigabyte of positions at 64^3."""


def check_grid(grid: tuple[int, ...], padding: tuple[str, ...]) -> None:
    """Raise a ValueError if the grid is too small for convolutions and positions."""
    for axis, points in enumerate(grid):
        if points < 2:
            raise ValueError(
                f"Grid {grid} is too small: axis {axis} has {points} point(s); give every axis at least 2."
            )
        if padding[axis] == "circular" and points < 3:
            raise ValueError(
                f"Grid {grid} is too small for circular padding: axis {axis} has {points} points; use at least 3 "
                f'or padding "zeros" there.'
            )


@dataclass(frozen=True)
class Options:
    """Less common settings.

    Example:
        >>> import sigmasolver
        >>> from sigmasolver.models import Options
        >>> options = Options(padding=("circular", "zeros"), dropout=0.1)
        >>> sizes = {"width": 16, "depth": 1, "heads": 2, "options": options}
        >>> model = sigmasolver.build_model("transolver-sigma", grid=(8, 8), in_channels=1, out_channels=1, **sizes)
    """

    expansion: int = 2
    """rho of the SwiGLU: inner width floor(2 rho width / 3)."""
    positions: str = "distances"
    """distances to a reference lattice; raw coordinates, each axis from 0 to 1; proportional ones, the first axis from
    0 to 1 and the others at its spacing (REALM); or distances-proportional, both."""
    lattice: int | None = None
    """Reference points per axis; none: 64, 8 or 4 for one, two or three axes."""
    padding: str | tuple[str, ...] | None = None
    """zeros or circular, for all axes or for each; none: zeros, except for EddyFormer, which uses circular."""
    domain_padding: float | tuple[float, ...] = 0.0
    """Zero padding of each non-circular axis in the Fourier transforms, as a fraction of its points."""
    time_embedding: bool = False
    """Embed the time of the last given frame."""
    dropout: float = 0.0
    """After the slice-attention softmax and after the physical operator's output projection."""
    check_input: bool = False
    """Check every input for NaN and infinity. Costs a pass over it and, on a GPU, a synchronisation."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.expansion < 1:
            raise ValueError(f"expansion is {self.expansion}; it must be at least 1.")
        if self.positions not in POSITIONS:
            raise ValueError(f'positions is "{self.positions}"; choose one of {", ".join(POSITIONS)}.')
        if self.lattice is not None and self.lattice < 2:
            raise ValueError(f"lattice is {self.lattice}; it must be at least 2 reference points per axis.")
        given = (self.padding,) if isinstance(self.padding, str) else self.padding or ()
        unknown = [kind for kind in given if kind not in PADDINGS]
        if unknown:
            raise ValueError(f'padding has "{unknown[0]}"; choose "zeros" or "circular", for all axes or for each.')
        fractions = self.domain_padding if isinstance(self.domain_padding, tuple) else (self.domain_padding,)
        if not all(0 <= fraction <= 2 for fraction in fractions):
            raise ValueError(f"domain_padding is {self.domain_padding}; it must be at least 0 and at most 2.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Size of a model; channels and grid follow from the task."""

    width: int = 128
    """Hidden channels."""
    depth: int = 8
    """Number of blocks."""
    heads: int = 8
    """Attention heads per half of the channels; the width must be a multiple of twice this number."""
    slices: int = 32
    """Slices of the physical operator."""
    modes: int | tuple[int, ...] = 4
    """Fourier modes to keep, for all axes or for each."""
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class SolverConfig(ModelSize):
    """Everything that determines the parameters of a model, apart from its name.

    `grid` is the grid of the training data; the model also runs on others with the same number of axes.
    """

    grid: tuple[int, ...]
    in_channels: int
    out_channels: int
    conditions: int = 0
    """Scalars per sample (a Reynolds number, a frequency) that are embedded like the time."""
    in_frames: int = 1
    out_frames: int = 1
    """Number of frames in the channels, which are ordered frame by frame; most models ignore it."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.axes <= 3:
            raise ValueError(f"Grid {self.grid} has {self.axes} axes; solvers support one, two or three.")
        for name, size in (
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("width", self.width),
            ("depth", self.depth),
            ("heads", self.heads),
            ("slices", self.slices),
        ):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1.")
        if self.conditions < 0:
            raise ValueError(f"conditions is {self.conditions}; it must be at least 0.")
        for side, frames, channels in (
            ("in", self.in_frames, self.in_channels),
            ("out", self.out_frames, self.out_channels),
        ):
            if frames < 1 or channels % frames:
                raise ValueError(
                    f"{side}_frames is {frames}; it must be at least 1 and divide {side}_channels = {channels}."
                )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not divisible by 2 x heads = {2 * self.heads}: each half of the channels is "
                f"split into heads; use a width such as {self._nearest_width()}."
            )
        options = self.options
        for name, value in (
            ("modes", self.modes),
            ("padding", options.padding),
            ("domain_padding", options.domain_padding),
        ):
            if isinstance(value, tuple) and len(value) != self.axes:
                raise ValueError(f"{name} has {len(value)} entries for {self.axes} axes; give one for each axis.")
        check_grid(self.grid, self.padding)
        if min(self.modes_per_axis) < 1:
            raise ValueError(f"modes is {self.modes}; every axis needs at least 1 (the mean).")

    def _nearest_width(self) -> int:
        unit = 2 * self.heads
        return max(unit, round(self.width / unit) * unit)

    def check_modes(self) -> None:
        """Raise a ValueError if the grid has too few points for `modes`; for models with Fourier modes."""
        for axis, (points, modes) in enumerate(zip(self.grid, self.modes_per_axis, strict=True)):
            if modes > available_modes(points):
                raise ValueError(
                    f"Grid {self.grid} is too small for modes={self.modes}: axis {axis} with {points} points has "
                    f"{available_modes(points)} modes; lower modes or use at least {2 * (modes - 1)} points."
                )

    @property
    def axes(self) -> int:
        return len(self.grid)

    @property
    def scalars(self) -> int:
        """Number of embedded scalars per sample: the time, if embedded, and the conditions."""
        return self.options.time_embedding + self.conditions

    @property
    def in_fields(self) -> int:
        """Channels per input frame."""
        return self.in_channels // self.in_frames

    @property
    def out_fields(self) -> int:
        """Channels per output frame."""
        return self.out_channels // self.out_frames

    @property
    def modes_per_axis(self) -> tuple[int, ...]:
        return self.modes if isinstance(self.modes, tuple) else (self.modes,) * self.axes

    @property
    def padding(self) -> tuple[str, ...]:
        given = self.options.padding or "zeros"
        return (given,) * self.axes if isinstance(given, str) else given

    @property
    def domain_padding(self) -> tuple[float, ...]:
        """Fraction per axis; 0 on periodic axes."""
        given = self.options.domain_padding
        fractions = given if isinstance(given, tuple) else (given,) * self.axes
        return tuple(0.0 if end == "circular" else part for part, end in zip(fractions, self.padding, strict=True))

    @property
    def lattice(self) -> int:
        return self.options.lattice or LATTICE[self.axes]

    @property
    def position_channels(self) -> int:
        """Number of position features per point."""
        distances = self.lattice**self.axes
        channels: dict[str, int] = {"distances": distances, "distances-proportional": distances + self.axes}
        return channels.get(self.options.positions, self.axes)
