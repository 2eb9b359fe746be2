"""SwiGLU against eq:swiglu-implementation written element by element."""

import math

import torch

from sigmasolver.ops.swiglu import swiglu


def test_equals_the_formula():
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
