"""Routing, slicing and deslicing against loops over points, slices and heads in float64."""

import math

import torch

from sigmasolver.ops.slices import EPSILON, attention_matrix, deslice, routing, slice_states

B, H, N, M, D = 2, 3, 11, 4, 5


def draw():
    R, F = torch.randn(2, B, H, N, D, dtype=torch.float64)
    weight, bias = torch.randn(D, M, dtype=torch.float64), torch.randn(M, dtype=torch.float64)
    temperature = torch.tensor([0.1, 0.5, 5.0], dtype=torch.float64)
    return R, F, weight, bias, temperature


def test_routing_is_a_softmax_with_one_temperature_per_head():
    R, _, weight, bias, temperature = draw()
    P = routing(R, weight, bias, temperature)
    torch.testing.assert_close(P.sum(-1), torch.ones(B, H, N, dtype=torch.float64), rtol=0, atol=1e-14)
    for b, h, n in ((0, 0, 0), (1, 1, 7), (1, 2, 10)):
        scores = [math.exp((R[b, h, n] @ weight[:, m] + bias[m]).item() / temperature[h].item()) for m in range(M)]
        expected = torch.tensor([s / sum(scores) for s in scores], dtype=torch.float64)
        torch.testing.assert_close(P[b, h, n], expected, rtol=1e-12, atol=0)


def test_slice_states_are_weighted_means_and_deslice_reads_them_back():
    R, F, weight, bias, temperature = draw()
    P = routing(R, weight, bias, temperature)
    Z, O = slice_states(P, F), deslice(P, slice_states(P, F))
    for b, h, m in ((0, 0, 0), (1, 2, 3)):
        mass = sum(P[b, h, n, m] for n in range(N)) + EPSILON
        expected = sum(P[b, h, n, m] * F[b, h, n] for n in range(N)) / mass
        torch.testing.assert_close(Z[b, h, m], expected, rtol=1e-13, atol=0)
    n = 6
    torch.testing.assert_close(O[1, 1, n], sum(P[1, 1, n, m] * Z[1, 1, m] for m in range(M)), rtol=1e-13, atol=0)


def test_slice_states_of_an_empty_slice_are_zero():
    P = torch.zeros(1, 1, N, M)
    P[..., 0] = 1
    Z = slice_states(P, torch.randn(1, 1, N, D))
    assert torch.isfinite(Z).all() and Z[0, 0, 1:].abs().max() == 0


def test_attention_matrix_matches_torch_attention():
    Q, K, V = torch.randn(3, B, H, M, D, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    torch.testing.assert_close(attention_matrix(Q, K) @ V, expected, rtol=0, atol=1e-14)


def test_deslice_is_attention_of_points_over_slices():
    """The identity behind a fused form: q = [R, 1] / tau, k = [W_s, b_s], v = Z, scale one."""
    R, F, weight, bias, temperature = draw()
    P = routing(R, weight, bias, temperature)
    Z = slice_states(P, F)
    q = torch.cat((R, torch.ones(B, H, N, 1, dtype=R.dtype)), -1) / temperature[:, None, None]
    k = torch.cat((weight.T, bias[:, None]), -1).expand(B, H, M, D + 1)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, Z, scale=1.0)
    torch.testing.assert_close(deslice(P, Z), fused, rtol=0, atol=1e-13)
