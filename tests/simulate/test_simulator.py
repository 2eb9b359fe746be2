"""Samples are computed one by one on a CPU: bitwise the same for any batch and thread count; errors and progress."""

import pytest
import torch

from sigmasolver.simulate.simulator import Tick, map_samples, run_each


def chain(batch: torch.Tensor, tick: Tick) -> torch.Tensor:
    """Transforms and products, whose round-off depends on the batch if it is computed in one call."""
    return torch.fft.irfft2(torch.fft.rfft2(batch @ batch) ** 2, s=batch.shape[-2:]) @ batch.mT


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_map_samples_is_bitwise_independent_of_batch_and_threads(threads: int) -> None:
    batch = torch.randn(7, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = torch.get_num_threads()
    alone = torch.cat([map_samples(chain, sample[None]) for sample in batch])
    torch.set_num_threads(threads)
    try:
        together = map_samples(chain, batch)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, chain(batch, lambda fraction: None))


def test_map_samples_rejects_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="No trajectories requested; give at least one index"):
        map_samples(chain, torch.zeros(0, 8, 8))


def test_run_each_reports_the_mean_progress() -> None:
    seen: list[float] = []

    def work(index: int, tock: Tick) -> None:
        tock(0.5)

    run_each(4, work, seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 8 and seen[-1] == 1.0


def test_run_each_propagates_errors_and_restores_the_thread_count() -> None:
    started: list[int] = []
    before = torch.get_num_threads()

    def work(index: int, tock: Tick) -> None:
        started.append(index)
        if index == 0:
            raise ValueError("sample 0 is bad")
        for step in range(1000):
            tock(step / 1000)

    with pytest.raises(ValueError, match="sample 0 is bad"):
        run_each(500, work)
    assert torch.get_num_threads() == before
