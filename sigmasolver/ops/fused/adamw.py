"""AdamW for all parameters of a model in one kernel.

With gradient g, learning rate r, step t (Loshchilov and Hutter), as in torch:

    w <- (1 - r decay) w     m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
    w <- w - r / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + eps)

torch's own kernel splits parameters into large chunks, which leave most of a large GPU idle for a model of a million
parameters.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

import torch

from sigmasolver.ops.dispatch import why_plain
from sigmasolver.ops.fused.tuning import PIECE

__all__ = ["FusedAdamW"]


class FusedAdamW:
    """The update of an AdamW optimiser in a captured step; uses the state of that optimiser after its first step."""

    def __init__(self, optimiser: torch.optim.AdamW) -> None:
        (self.group,) = optimiser.param_groups
        self.state = optimiser.state
        self._gradients: list[torch.Tensor] = []
        pieces = sum(-(-parameter.numel() // PIECE) for parameter in self.group["params"])
        device = self.group["params"][0].device
        self._table = torch.empty(pieces, 6, dtype=torch.int64, device=device)

    @staticmethod
    def supports(optimiser: torch.optim.AdamW) -> bool:
        """Whether the kernel supports every parameter, gradient and state of this optimiser."""
        states = (optimiser.state.get(parameter, ()) for parameter in optimiser.param_groups[0]["params"])
        return FusedAdamW.will_support(optimiser) and all(len(state) == 3 for state in states)

    @staticmethod
    def will_support(optimiser: torch.optim.AdamW) -> bool:
        """The same before the first step, which creates the states."""
        group, *further_groups = optimiser.param_groups
        plain = not further_groups and not group["amsgrad"] and not group["maximize"] and min(group["betas"]) > 0
        tensors = [tensor for parameter in group["params"] for tensor in (parameter, parameter.grad)]
        return (
            plain
            and isinstance(group["lr"], torch.Tensor)
            and all(
                tensor is not None
                and why_plain(tensor) is None
                and tensor.dtype == torch.float32
                and tensor.is_contiguous()
                for tensor in tensors
            )
        )

    def step(self) -> None:
        """Update the parameters. In a capture, call `fill` afterwards, before the graph is replayed."""
        self._gradients = [parameter.grad for parameter in self.group["params"]]
        self.launch()
        torch._foreach_add_([self.state[parameter]["step"] for parameter in self.group["params"]], 1)

    def launch(self) -> None:
        """Launch the kernel alone."""
        group, (beta1, beta2) = self.group, self.group["betas"]
        kernels = importlib.import_module("sigmasolver.ops.fused.parameter_kernels")
        kernels.adamw_step[(len(self._table),)](
            self._table, group["lr"], BETA1=beta1, BETA2=beta2, LOG_BETA1=math.log2(beta1),
            LOG_BETA2=math.log2(beta2), EPS=group["eps"], DECAY=group["weight_decay"],
            PIECE=PIECE, TABLE_COLUMNS=self._table.shape[1],
        )  # fmt: skip

    def fill(self) -> None:
        """Write the table of addresses: parameters, gradients of the last `step`, and states."""
        rows: list[Sequence[int]] = []
        for parameter, gradient in zip(self.group["params"], self._gradients, strict=True):
            state = self.state[parameter]
            tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
            for start in range(0, parameter.numel(), PIECE):
                addresses = [tensor.data_ptr() + 4 * start for tensor in tensors]
                rows.append((*addresses, state["step"].data_ptr(), min(PIECE, parameter.numel() - start)))
        self._table.copy_(torch.tensor(rows, dtype=torch.int64))
