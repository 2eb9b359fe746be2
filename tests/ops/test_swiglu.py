"""SwiGLU against eq:swiglu-implementation, element by element."""

import math

import torch

from sigmasolver.ops.fused.tuning import ALIGNMENT
from sigmasolver.ops.swiglu import _pad_inner_width, swiglu


def test_swiglu_equals_the_formula():
    C, F = 4, 3
    H = torch.randn(5, C, dtype=torch.float64)
    Wg, Wu = torch.randn(2, C, F, dtype=torch.float64)
    Wd = torch.randn(F, C, dtype=torch.float64)
    bg, bu, bd = (torch.randn(size, dtype=torch.float64) for size in (F, F, C))
    result = swiglu(H, torch.cat((Wg, Wu), 1).T, torch.cat((bg, bu)), Wd.T, bd)
    for point in range(5):
        gated = []
        for f in range(F):
            gate = (H[point] @ Wg[:, f] + bg[f]).item()
            up = (H[point] @ Wu[:, f] + bu[f]).item()
            gated.append(gate / (1 + math.exp(-gate)) * up)
        expected = torch.tensor(gated, dtype=torch.float64) @ Wd + bd
        torch.testing.assert_close(result[point], expected, rtol=0, atol=1e-13)


def test_swiglu_is_unchanged_by_padding_the_inner_width():
    width, inner = 6, 21
    H, a, b = torch.randn(5, width), torch.randn(2 * inner, width), torch.randn(2 * inner)
    c, d = torch.randn(width, inner), torch.randn(width)
    parameters = [tensor.double().requires_grad_() for tensor in (a, b, c)]
    padded = _pad_inner_width(*parameters)
    assert padded[2].shape[1] % ALIGNMENT == 0
    expected = swiglu(H.double(), *parameters, d.double())
    result = swiglu(H.double(), *padded, d.double())
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (expected, result)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
