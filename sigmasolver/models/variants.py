"""The registry of models: Transolver-sigma, its single-domain counterparts, the ablations of tab:ablation-components,
and the baselines."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sigmasolver.models.baselines.drift_net import drift_net
from sigmasolver.models.baselines.eddyformer import Elements, eddyformer
from sigmasolver.models.baselines.factformer import Form, factformer
from sigmasolver.models.baselines.ffno import ffno, ffno_markov
from sigmasolver.models.baselines.fno import fno
from sigmasolver.models.baselines.hpm import hpm
from sigmasolver.models.baselines.linearno import linearno
from sigmasolver.models.baselines.rno import rno
from sigmasolver.models.baselines.transolver import transolver
from sigmasolver.models.baselines.transolver_plus import transolver_plus
from sigmasolver.models.baselines.unet import unet
from sigmasolver.models.baselines.vit import vit
from sigmasolver.models.block import Block, BlockSpec
from sigmasolver.models.config import Options, SolverConfig
from sigmasolver.models.solver import GridModel, Solver
from sigmasolver.plugins import Registry, declared
from sigmasolver.settings import lookup

__all__ = [
    "BASELINES",
    "VARIANTS",
    "build_model",
    "build_solver",
    "count_parameters",
    "list_models",
    "matched_width",
    "on_meta_device",
    "register_model",
]

SIGMA = BlockSpec()
VARIANTS: dict[str, BlockSpec] = {
    "transolver-sigma": SIGMA,
    "physolver": replace(SIGMA, stages=(("physical",),)),
    "specsolver": replace(SIGMA, stages=(("spectral",),)),
    "no-physical": replace(SIGMA, stages=(("spectral", "pass"),)),
    "no-spectral": replace(SIGMA, stages=(("pass", "physical"),)),
    "physical-then-spectral": replace(SIGMA, stages=(("physical",), ("spectral",))),
    "spectral-then-physical": replace(SIGMA, stages=(("spectral",), ("physical",))),
    "no-context": replace(SIGMA, context=False),
    "grouped-mixing": replace(SIGMA, mixing="grouped"),
    "slice-replace": replace(SIGMA, update="replace"),
    "slice-keep": replace(SIGMA, update="keep"),
}


IT3D = Form(heads=6, kernel=3, latent=1.5, norm_groups=8, by_field=True)
SMOKE3D = replace(IT3D, norm_groups=12, box=8.0, features=1.0, margin=2, convolutions=True)
DARCY = Form(heads=12, latent=None, box=1.0, features=1.0, convolutions=True)
"""FactFormer as released for these tasks."""

ModelBuilder = Callable[[SolverConfig], nn.Module]
"""Builds a model from its sizes."""
BASELINES: dict[str, ModelBuilder] = {
    "transolver": partial(transolver, update="replace"),
    "transolver-srpa": partial(transolver, update="residual"),
    "transolver-keep": partial(transolver, update="keep"),
    "linearno": partial(linearno, local=True),
    "linearno-plain": partial(linearno, local=False),
    "ffno": ffno,
    "ffno-markov": ffno_markov,
    "fno": partial(fno, original=False),
    "fno-original": partial(fno, original=True),
    "unet": partial(unet, norm="instance"),
    "unet-batchnorm": partial(unet, norm="batch"),
    "vit": vit,
    "hpm": hpm,
    "hpm-frozen": partial(hpm, stored=True),
    "drift-net": partial(drift_net, released=False),
    "drift-net-released": partial(drift_net, released=True),
    "transolver-plus": transolver_plus,
    "transolver-plus-linear": partial(transolver_plus, local=False),
    "rno": rno,
    "rno-two-blocks": partial(rno, radon_blocks=2),
    "factformer": factformer,
    "factformer-it3d": partial(factformer, form=IT3D),
    "factformer-smoke3d": partial(factformer, form=SMOKE3D),
    "factformer-darcy": partial(factformer, form=DARCY),
    "eddyformer": eddyformer,
    "eddyformer-2d": partial(eddyformer, elements=Elements(nodes=25, density=1.5, reach=8)),
    "eddyformer-3d": partial(eddyformer, elements=Elements(nodes=13, coarse=6)),
}


def _check_builder(name: str, builder: Any) -> ModelBuilder:
    if not callable(builder):
        raise ValueError(f'The builder of "{name}" must be a function of a SolverConfig, not {type(builder).__name__}.')
    checked: ModelBuilder = builder
    return checked


MODELS: Registry[ModelBuilder] = Registry(
    "model",
    {name: partial(Solver, partial(Block, spec)) for name, spec in VARIANTS.items()} | BASELINES,
    "sigmasolver.models",
    _check_builder,
    "sigmasolver.register_model",
)


def _builder_of(name: str) -> ModelBuilder:
    if MODELS.knows(name):
        return MODELS.find(name)
    # Without a close match the error lists the variants only: all names would be too long a sentence.
    near = difflib.get_close_matches(name.lower(), MODELS, cutoff=0.4)
    return lookup(MODELS if near else {family: MODELS[family] for family in VARIANTS}, name, "model")


def register_model(name: str, builder: ModelBuilder) -> None:
    """Register a model of your own by name, for `build_model`, recipes, training and `load`.

    A run stores the name of its model, not its code: register the same builder before loading the run.

    Args:
        name: letters, digits, dots, hyphens and underscores; must not be registered already.
        builder: takes a `SolverConfig` (grid, in_channels, out_channels, width, depth, ...) and returns an
            `nn.Module` that maps `(B, *grid, in_channels)` to `(B, *grid, out_channels)`.

    Example:
        >>> import torch, sigmasolver
        >>> def pointwise(config):
        ...     return torch.nn.Linear(config.in_channels, config.out_channels)
        >>> sigmasolver.register_model("pointwise", pointwise)
        >>> model = sigmasolver.build_model("pointwise", grid=(16, 16), in_channels=3, out_channels=1)
        >>> model(torch.zeros(2, 16, 16, 3)).shape
        torch.Size([2, 16, 16, 1])
    """
    MODELS.register(name, builder)


def list_models() -> tuple[str, ...]:
    """The names of all models.

    Returns:
        Transolver-sigma and its variants, the baselines, models of `register_model`, then those of installed packages.

    Example:
        >>> import sigmasolver
        >>> sigmasolver.list_models()[:3]
        ('transolver-sigma', 'physolver', 'specsolver')
    """
    return MODELS.names()


def build_model(
    name: str,
    *,
    grid: tuple[int, ...],
    in_channels: int,
    out_channels: int,
    width: int = 128,
    depth: int = 8,
    heads: int = 8,
    slices: int = 32,
    modes: int | tuple[int, ...] = 4,
    options: Options | None = None,
    in_frames: int = 1,
    out_frames: int = 1,
) -> nn.Module:
    """Build a model with random weights; call `torch.manual_seed` first to fix them.

    A model without Fourier modes ignores `modes`, and most models ignore `in_frames` and `out_frames`.

    Args:
        name: one of `list_models()`.
        grid: points per axis, of one to three axes; the model also runs on other grids with as many axes.
        in_channels: input fields times input frames.
        out_channels: output fields times output frames.
        width: hidden channels.
        depth: number of blocks.
        heads: attention heads of each half of the channels.
        slices: slices of the physical operator.
        modes: Fourier modes to keep, for all axes or for each.
        options: everything else, see `Options`.
        in_frames: number of frames in `in_channels`.
        out_frames: number of frames in `out_channels`.

    Returns:
        A module that maps `(B, *grid, in_channels)` to `(B, *grid, out_channels)`.

    Example:
        >>> import torch, sigmasolver
        >>> sizes = {"width": 16, "depth": 1, "heads": 2, "slices": 4}
        >>> model = sigmasolver.build_model("transolver-sigma", grid=(16, 16), in_channels=3, out_channels=1, **sizes)
        >>> model(torch.zeros(2, 16, 16, 3)).shape
        torch.Size([2, 16, 16, 1])
    """
    _builder_of(name)  # an unknown name is reported before invalid sizes
    config = SolverConfig(
        grid,
        in_channels,
        out_channels,
        width=width,
        depth=depth,
        heads=heads,
        slices=slices,
        modes=modes,
        options=Options() if options is None else options,
        in_frames=in_frames,
        out_frames=out_frames,
    )
    return build_solver(name, config)


def build_solver(name: str, config: SolverConfig) -> nn.Module:
    """`build_model` with the sizes as a `SolverConfig`."""
    model = _builder_of(name)(config)
    if not isinstance(model, nn.Module):
        raise ValueError(f'The builder of "{name}" returned {type(model).__name__}; it must return an nn.Module.')
    if config.scalars and not _embeds_time(model):
        raise ValueError(
            f"{name} has no time embedding; set model.options.time_embedding=false and task.conditions=(), or choose "
            "another model."
        )
    if any(config.domain_padding) and not any(isinstance(part, PadsDomain) for part in model.modules()):
        raise ValueError(f"{name} has no Fourier transform to pad; set model.options.domain_padding=0.")
    return model


@runtime_checkable
class PadsDomain(Protocol):
    """A module that zero-pads non-periodic axes before Fourier transforms."""

    domain_padding: Sequence[float]


def _embeds_time(model: nn.Module) -> bool:
    if isinstance(model, GridModel):
        return model.time is not None
    return declared(model, "time") is not None  # as Python 3.12 checks protocols, submodules are not attributes


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build models on the meta device: names, shapes and dtypes only, no memory and no initialisation."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Skips functions that only fill or scale a tensor: on the meta device torch runs them through Python
    decompositions, which imports SymPy and torch._dynamo and takes as long as importing torch itself."""

    FILLS = frozenset(
        (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.fill_, torch.Tensor.zero_, torch.Tensor.div_)
    )
    INITS = frozenset((nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_))
    SCALES = frozenset(
        (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.div, torch.Tensor.__truediv__)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FILLS and args:
            return args[0]
        if func in self.INITS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.ndim > 1 or func is not nn.init.kaiming_uniform_:  # which refuses a vector
                return tensor
        if func in self.SCALES and type(args[0]) is torch.Tensor and type(args[-1]) in (int, float):
            return args[0] if args[0].is_floating_point() else func(*args, **kwargs)
        return func(*args, **kwargs)


def count_parameters(name: str, config: SolverConfig) -> int:
    """The number of trainable parameters; allocates no memory, so any size works."""
    with on_meta_device():
        return sum(p.numel() for p in build_solver(name, config).parameters() if p.requires_grad)


def matched_width(name: str, config: SolverConfig, target: int | None = None) -> int:
    """The width at which `name` has the number of parameters closest to `target` (default: transolver-sigma's).

    At equal width the variants differ in size (a full-width spectral stage has four times the weights of a half-width
    one), so a comparison at equal size needs a width for each.
    """
    target = count_parameters("transolver-sigma", config) if target is None else target
    unit = 2 * config.heads
    widths = range(unit, 4 * config.width + unit, unit)

    @cache
    def count(width: int) -> int:
        return count_parameters(name, replace(config, width=width))

    if not count(widths[0]) <= target <= count(widths[-1]):
        raise ValueError(
            f"{name} has {count(widths[0]):,} to {count(widths[-1]):,} parameters for widths {widths[0]} to "
            f"{widths[-1]}; {target:,} is out of range."
        )
    first_above = bisect.bisect_left(widths, target, key=count)
    return min(widths[max(first_above - 1, 0) : first_above + 1], key=lambda width: abs(count(width) - target))
