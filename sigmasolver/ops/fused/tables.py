"""One kernel for all the parameters of a model: what each of its programs does is a row of a table of addresses.

`Prepared` makes the forms in which fused twins read parameters (narrow, turned, filled up with zeros), all at the start
of a captured step instead of one by one where they are needed:

    to[i across + j along] = weight[i, j]        for weights seen as (I, J) matrices

`Moments` is the update of AdamW with gradient g, rate r, step t (Loshchilov and Hutter), as torch has it:

    w <- (1 - r decay) w     m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
    w <- w - r / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + eps)

torch's own takes large pieces for a GPU of many units, and leaves most of them idle on a model of a million parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sigmasolver.ops import fused

__all__ = ["Form", "Moments", "Prepared", "form_of", "narrowed"]

PIECE = 1024
"""Numbers of a tensor that one program takes."""


def _kernels() -> Any:
    from sigmasolver.ops.fused import table_kernels

    return table_kernels


@dataclass(frozen=True)
class Form:
    """How a parameter, seen as a matrix (I, J), lies in the tensor that a fused twin reads."""

    shape: tuple[int, ...]
    """Of that tensor; what no number of the parameter reaches is zero."""
    matrix: tuple[int, int]
    strides: tuple[int, int]
    """Between rows and between columns of the parameter, in numbers of that tensor."""
    dtype: torch.dtype

    def made(self, weight: torch.Tensor) -> torch.Tensor:
        """One by one, with torch."""
        dense = math.prod(self.shape) == math.prod(self.matrix)
        out = (torch.empty if dense else torch.zeros)(self.shape, device=weight.device, dtype=self.dtype)
        out.as_strided(self.matrix, self.strides).copy_(weight.detach().reshape(self.matrix))
        return out


def form_of(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """The parameter in this form; read it, do not write to it."""
    prepared = _open.now
    return form.made(weight) if prepared is None else prepared.form(weight, form)


def narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter in this type; itself where it is of that type."""
    if weight.dtype == dtype:
        return weight
    size = weight.numel()
    return form_of(weight, Form(tuple(weight.shape), (1, size), (size, 1), dtype))


class Prepared:
    """The forms of a model's parameters: learned in a step that makes them one by one, then made all at once."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {one.data_ptr(): one for one in parameters if one.is_contiguous()}
        self._forms: dict[tuple[int, Form], torch.Tensor] = {}
        self._table: torch.Tensor | None = None
        self._ready = False

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Inside: forms are made where they are needed, and remembered."""
        self._ready = False
        with _open.holding(self):
            yield

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside: every remembered form is there already, made at the beginning of the values of that moment."""
        if self._forms:
            if self._table is None:
                raise ValueError("The table of forms is not there yet; call `fill` after the last step that learned.")
            _kernels().prepare[(len(self._table),)](self._table, PIECE=PIECE, WIDTH=self._table.shape[1])
        self._ready = True
        with _open.holding(self):
            yield

    def fill(self) -> None:
        """Write the table of what was learned."""
        rows = []
        for (place, form), to in self._forms.items():
            (_, J), wide = form.matrix, int(form.dtype == torch.float32)
            for start in range(0, math.prod(form.matrix), PIECE):
                count = min(PIECE, math.prod(form.matrix) - start)
                rows.append((place, to.data_ptr(), start, count, J, *form.strides, wide))
        device = next(iter(self._forms.values())).device if self._forms else None
        self._table = torch.tensor(rows, dtype=torch.int64, device=device) if rows else None

    def form(self, weight: torch.Tensor, form: Form) -> torch.Tensor:
        key = weight.data_ptr(), form
        if not weight.is_contiguous():  # a view that begins where a parameter does
            return form.made(weight)
        if self._ready:
            # Before the first replay nothing is there yet: another thread makes its own.
            known = key in self._forms and (not weight.is_cuda or torch.cuda.is_current_stream_capturing())
            return self._forms[key] if known else form.made(weight)
        own = self._parameters.get(key[0])
        whole = own is not None and own.dtype == torch.float32 and own.numel() == math.prod(form.matrix)
        if whole and form.dtype in (torch.float32, torch.bfloat16):
            self._forms.setdefault(key, torch.zeros(form.shape, device=weight.device, dtype=form.dtype))
        return form.made(weight)


_open: fused.Slot[Prepared] = fused.Slot()


class Moments:
    """The update of an AdamW in a captured step, with the states of that optimiser, which made at least one step."""

    def __init__(self, optimiser: torch.optim.AdamW) -> None:
        (self.group,) = optimiser.param_groups
        self.state = optimiser.state
        self._given: list[torch.Tensor] = []
        pieces = sum(-(-one.numel() // PIECE) for one in self.group["params"])
        device = self.group["params"][0].device
        self._table = torch.empty(pieces, 6, dtype=torch.int64, device=device)

    @staticmethod
    def serves(optimiser: torch.optim.AdamW) -> bool:
        """Whether every parameter and gradient is of the kind that the kernel reads."""
        group, *others = optimiser.param_groups
        plain = not others and not group["amsgrad"] and not group["maximize"] and min(group["betas"]) > 0
        tensors = [tensor for one in group["params"] for tensor in (one, one.grad)]
        return (
            plain
            and isinstance(group["lr"], torch.Tensor)
            and all(len(optimiser.state.get(one, ())) == 3 for one in group["params"])
            and all(
                one is not None and fused.usable(one) and one.dtype == torch.float32 and one.is_contiguous()
                for one in tensors
            )
        )

    def step(self) -> None:
        """Launch the update. In a capture, `fill` the table afterwards, before the graph is replayed."""
        self._given = [one.grad for one in self.group["params"]]
        group, (first, second) = self.group, self.group["betas"]
        _kernels().adamw[(len(self._table),)](
            self._table, group["lr"], FIRST=first, SECOND=second, LOG_FIRST=math.log2(first),
            LOG_SECOND=math.log2(second), EPS=group["eps"], DECAY=group["weight_decay"],
            PIECE=PIECE, WIDTH=self._table.shape[1],
        )  # fmt: skip
        torch._foreach_add_([self.state[one]["step"] for one in group["params"]], 1)

    def fill(self) -> None:
        """Write where the parameters, the gradients of the last `step` and the states lie."""
        rows: list[Sequence[int]] = []
        for one, gradient in zip(self.group["params"], self._given, strict=True):
            state = self.state[one]
            tensors = one, gradient, state["exp_avg"], state["exp_avg_sq"]
            for start in range(0, one.numel(), PIECE):
                places = [tensor.data_ptr() + 4 * start for tensor in tensors]
                rows.append((*places, state["step"].data_ptr(), min(PIECE, one.numel() - start)))
        self._table.copy_(torch.tensor(rows, dtype=torch.int64))
