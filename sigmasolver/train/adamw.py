"""AdamW without torch's compiler."""

from __future__ import annotations

from inspect import unwrap

import torch

__all__ = ["AdamW"]


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrapper that hides the methods below from torch.compile: it imports the compiler, which
    takes a second or more at every start. Optimisers are never traced here, so the methods do not need it."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
