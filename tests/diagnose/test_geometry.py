"""The geometry functions against their plain definitions and the identities the paper states for them."""

import pytest
import torch

from sigmasolver.diagnose.geometry import (
    centre,
    centred_gain,
    centred_variation,
    diameter,
    dobrushin,
    pairwise_dobrushin,
)

SEEDS = range(4)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_rows(seed: int, *shape: int, sharpness: float = 1.0) -> torch.Tensor:
    return (sharpness * draw(seed, *shape)).softmax(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_geometry_of_each_head_is_independent(seed):
    Z, A, W = draw(seed, 2, 3, 5, 4), softmax_rows(seed + 10, 2, 3, 5, 5), draw(seed + 20, 4, 4)
    all_heads = (diameter(Z), centred_variation(Z), dobrushin(A), pairwise_dobrushin(A), centred_gain(A, W))
    for b in range(2):
        for h in range(3):
            z, a = Z[b, h], A[b, h]
            one_head = (diameter(z), centred_variation(z), dobrushin(a), pairwise_dobrushin(a), centred_gain(a, W))
            for batched, single in zip(all_heads, one_head, strict=True):
                torch.testing.assert_close(batched[b, h], single, rtol=1e-13, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_geometry_matches_loops_over_pairs_and_a_dense_projection(seed):
    Z, A, W = draw(seed, 5, 3), softmax_rows(seed + 10, 5, 5), draw(seed + 20, 3, 3)
    pairs = [(i, j) for i in range(5) for j in range(5)]
    Pi = torch.eye(5, dtype=torch.float64) - torch.full((5, 5), 1 / 5, dtype=torch.float64)
    eta_ij = torch.stack([(A[i] - A[j]).abs().sum() / 2 for i, j in pairs]).reshape(5, 5)
    exact = {"rtol": 1e-13, "atol": 1e-15}

    torch.testing.assert_close(centre(Z), Pi @ Z, **exact)
    torch.testing.assert_close(diameter(Z), torch.stack([(Z[i] - Z[j]).norm() for i, j in pairs]).max(), **exact)
    torch.testing.assert_close(centred_variation(Z), (Pi @ Z).norm(), **exact)
    torch.testing.assert_close(pairwise_dobrushin(A), eta_ij, **exact)
    torch.testing.assert_close(dobrushin(A), eta_ij.max(), **exact)
    # Π A Π and Π A differ only if rows do not sum to one (attention after dropout).
    for attention in (A, A * torch.arange(5)[:, None]):
        gain = torch.linalg.svdvals(Pi @ attention @ Pi)[0] * torch.linalg.svdvals(W)[0]
        torch.testing.assert_close(centred_gain(attention, W), gain, **exact)


@pytest.mark.parametrize("seed", SEEDS)
def test_centred_variation_is_the_energy_of_all_pairs(seed):
    """eq:centered-pairwise-energy."""
    Z = draw(seed, 7, 4) + 100.0
    energy = (Z[:, None] - Z[None]).pow(2).sum() / (2 * len(Z))
    torch.testing.assert_close(centred_variation(Z) ** 2, energy, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_diameter_and_variation_bound_each_other(seed):
    """Both vanish together: diam²/2 ≤ V² ≤ (M − 1) diam²/2, from eq:centered-pairwise-energy."""
    Z = draw(seed, 6, 3)
    d2, V2 = diameter(Z) ** 2, centred_variation(Z) ** 2
    assert d2 / 2 <= V2 <= (len(Z) - 1) * d2 / 2
    same = torch.ones(6, 1, dtype=torch.float64) * Z[:1]
    assert diameter(same) == 0
    assert centred_variation(same) < 1e-15


@pytest.mark.parametrize("seed", SEEDS)
def test_dobrushin_is_one_minus_the_least_overlap(seed):
    """eq:appendix-dobrushin-overlap, pair by pair and at the maximum."""
    A = softmax_rows(seed, 3, 6, 6, sharpness=3.0)
    overlap = torch.minimum(A[:, :, None], A[:, None]).sum(-1)
    torch.testing.assert_close(pairwise_dobrushin(A), 1 - overlap, rtol=0, atol=1e-14)
    torch.testing.assert_close(dobrushin(A), 1 - overlap.amin((-2, -1)), rtol=0, atol=1e-14)


def test_dobrushin_of_finite_softmax_is_below_one_but_not_uniformly():
    """prop:srpa-mixing: η < 1 for each matrix; it approaches one for sharper logits."""
    logits = draw(0, 6, 6)
    eta = torch.stack([dobrushin((s * logits).softmax(-1)) for s in (0.0, 1.0, 4.0, 16.0)])
    assert eta[0] == 0
    assert (eta < 1).all()
    assert (eta.diff() > 0).all()
    assert eta[-1] > 0.999


def test_dobrushin_of_known_matrices():
    eye = torch.eye(4, dtype=torch.float64)
    two_states = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    assert dobrushin(eye) == 1
    assert dobrushin(two_states) == 0.5
    torch.testing.assert_close(centred_gain(two_states, 2 * eye), torch.tensor(1.0, dtype=torch.float64))


def test_diameter_of_nearly_equal_slices_in_float32():
    Z = torch.full((4, 8), 3.0)
    Z[1, 0] += 2.0**-20
    assert diameter(Z) == 2.0**-20


def test_geometry_rejects_non_square_attention():
    with pytest.raises(ValueError, match=r"slice attention of shape .* got \(2, 4, 3\)"):
        dobrushin(torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="Expected slice attention"):
        centred_gain(torch.zeros(4), torch.eye(3))
