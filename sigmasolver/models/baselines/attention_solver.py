"""The architecture shared by several baselines: lift and readout of `models.solver` around pre-norm residual blocks.

    H --- + attention(LN(H)) --- + MLP(LN(H)) ---> H        MLP: width -> expansion width -> width, one GELU

Public implementations add the channel offset always (Neural-Solver-Library) or only without input fields (the methods'
own repositories); here always, as in Transolver-sigma. The number of parameters is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from sigmasolver.models.block import Branch
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import perceptron
from sigmasolver.models.solver import Solver

__all__ = ["attention_solver"]


def attention_solver(attention: Callable[[SolverConfig], nn.Module], config: SolverConfig) -> Solver:
    """A solver of `depth` blocks with the module `attention(config)`: `(B, *grid, width)` -> the same shape."""

    def block(config: SolverConfig) -> nn.Module:
        width = config.width
        mlp = perceptron(width, config.options.expansion * width, width)
        return nn.Sequential(OrderedDict(attention=Branch(width, attention(config)), mlp=Branch(width, mlp)))

    return Solver(block, config)
