"""The stream between the blocks of a solver, as one tensor or as two.

    H = main + rest        main: H rounded to bf16        rest: what `main` lacks, rounded to bf16

Where fused twins run under autocast they hand the stream on in two: forward it then has sixteen bits of fraction, while
its gradient, which autograd makes in the type of `main`, and all that is kept for the backward pass take half of
float32's bytes. No gradient goes through `rest`: it moves with `main`, so that of `main` is the gradient of H. Where
`rest` is None the stream is `main` alone, in whatever type it has.
"""

from __future__ import annotations

import torch

__all__ = ["NARROW", "whole"]

NARROW = torch.bfloat16


def whole(main: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """H in one tensor."""
    return main if rest is None else main.float() + rest
