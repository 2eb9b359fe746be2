"""`generate` gives the same file however it is interrupted or batched, and `Stream` the same values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sigmasolver.data.inspect import summarise
from sigmasolver.data.store import StoreError, open_store
from sigmasolver.simulate.darcy import Darcy
from sigmasolver.simulate.generate import Stream, generate
from sigmasolver.simulate.smoke import SMOKE3D
from sigmasolver.simulate.turbulence import IT3D
from sigmasolver.simulate.vorticity import DEMO
from tests.data.waves import Waves
from tests.forked import check_output

WAVES, COUNT, SEED = Waves(), 8, 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "waves.h5"
    generate(WAVES, COUNT, SEED, path)
    return path


def test_generate_stores_the_exact_solution(reference: Path) -> None:
    with open_store(reference) as reader:
        for index in range(COUNT):
            np.testing.assert_array_equal(reader[index], WAVES.exact(SEED, index).astype(np.float32))
        assert reader.header.source == "waves" and reader.header.seed == SEED
        assert reader.header.parameters["viscosity"] == 0.05 and reader.header.parameters["drift"] == [
            1.0,
            -0.5,
        ]


def test_generate_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int, float]] = []
    result = generate(WAVES, COUNT, SEED, tmp_path / "a.h5", progress=lambda *call: calls.append(call))
    assert (result.count, result.present) == (COUNT, 0)
    amounts = [(complete + fraction * min(WAVES.batch, COUNT - complete)) for complete, _, fraction in calls]
    assert amounts == sorted(amounts) and amounts[0] == 0 and amounts[-1] == COUNT
    assert {total for _, total, _ in calls} == {COUNT}
    assert len({fraction for _, _, fraction in calls}) > 3


@pytest.mark.parametrize("stops", [(3, 8), (1, 2, 5, 8), (8, 8)])
def test_generate_in_steps_equals_one_call(tmp_path: Path, reference: Path, stops: tuple[int, ...]) -> None:
    present = 0
    for count in stops:
        result = generate(WAVES, count, SEED, tmp_path / "a.h5")
        assert result.present == present
        present = count
    assert result.fingerprint == open_store(reference).fingerprint
    assert (tmp_path / "a.h5").read_bytes() == reference.read_bytes()


def test_generate_refuses_to_resume_with_other_parameters(tmp_path: Path, reference: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(reference.read_bytes())
    with pytest.raises(StoreError, match=r"parameter viscosity is 0\.05, expected 0\.1"):
        generate(replace(WAVES, viscosity=0.1), COUNT, SEED, path)
    with pytest.raises(StoreError, match="seed is 3, expected 4"):
        generate(WAVES, COUNT, 4, path)
    with pytest.raises(StoreError, match="dtype is 'float32', expected 'float16'"):
        generate(WAVES, COUNT, SEED, path, dtype="float16")
    assert path.read_bytes() == reference.read_bytes()


@dataclass(frozen=True)
class Batched(Waves):
    """Waves with a batch size that is not a parameter."""

    size: ClassVar[int] = 1

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        return self.size


def test_generate_is_independent_of_the_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for size in (1, 2, 5, 100):
        monkeypatch.setattr(Batched, "size", size)
        fingerprints.add(generate(Batched(), COUNT, SEED, tmp_path / f"{size}.h5").fingerprint)
    monkeypatch.setattr(Batched, "size", 5)
    generate(Batched(), 6, SEED, tmp_path / "grown.h5")
    monkeypatch.setattr(Batched, "size", 4)
    fingerprints.add(generate(Batched(), COUNT, SEED, tmp_path / "grown.h5").fingerprint)
    assert len(fingerprints) == 1


@dataclass(frozen=True)
class BlowsUp(Waves):
    def exact(self, seed: int, index: int) -> np.ndarray:
        return super().exact(seed, index) * (np.inf if index == 4 else 1)


def test_generate_stops_at_a_diverged_trajectory_and_keeps_earlier_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Trajectory 4 of waves diverged to non-finite values; use a smaller step"):
        generate(BlowsUp(), COUNT, SEED, tmp_path / "a.h5")
    assert len(open_store(tmp_path / "a.h5")) == 3


# --- kill -9


def check_and_resume(path: Path, reference: Path) -> int:
    """Check that the file left by a killed process is valid, and that the same call completes it, byte for byte."""
    complete = 0
    if path.exists():
        with open_store(path) as left, open_store(reference) as right:
            complete = len(left)
            np.testing.assert_array_equal(left[:], right[:complete])
            assert all(left.verify(index) for index in range(complete))
    result = generate(WAVES, open_store(reference).count, SEED, path)
    assert result.present == complete
    assert result.fingerprint == open_store(reference).fingerprint
    assert path.read_bytes() == reference.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return complete


def run_in_child(call: str) -> list[int]:
    """Result of a call of the waves module in a separate Python process, which may fork."""
    return json.loads(check_output(f"from tests.data.waves import *; print({call})"))


def kill_everywhere(where: str, folder: Path, reference: Path, before: int = 0, step: int = 1) -> list[int]:
    """Kill a generation at its 1st, 2nd, … moment until one survives; return the complete trajectories of each."""
    count = len(open_store(reference))
    killed_at = run_in_child(f"kill_everywhere({where!r}, {str(folder)!r}, {count}, {SEED}, {before}, {step})")
    return [check_and_resume(folder / str(moment) / "waves.h5", reference) for moment in killed_at]


def test_generate_killed_during_every_write(tmp_path: Path, reference: Path) -> None:
    complete = kill_everywhere("write", tmp_path, reference)
    writes = 3 * COUNT + 1  # values, digest and mark of each trajectory, plus the fingerprint
    assert len(complete) == writes
    assert complete == sorted(complete) and set(complete) == set(range(COUNT))


def test_generate_killed_during_every_write_of_a_resize(tmp_path: Path, reference: Path) -> None:
    complete = kill_everywhere("write", tmp_path, reference, before=4)
    assert complete[0] == 4 and complete[-1] == COUNT - 1


@pytest.mark.parametrize(("count", "step"), [(2, 12), pytest.param(7, 1, marks=pytest.mark.slow)])
def test_generate_killed_at_lines_of_the_store(tmp_path: Path, count: int, step: int) -> None:
    generate(WAVES, count, SEED, tmp_path / "reference.h5")
    complete = kill_everywhere("line", tmp_path, tmp_path / "reference.h5", step=step)
    assert len(complete) * step > 150 and {0, count} <= set(complete)


def test_generate_killed_at_random_times(tmp_path: Path) -> None:
    """A larger file, killed repeatedly from outside, only grows and ends up identical."""
    large, path = "Waves(grid=64, frames=8, batch=2)", tmp_path / "a.h5"
    complete = run_in_child(f"kill_at_random({str(path)!r}, {large}, 120, kills=6)")
    assert complete == sorted(complete)
    waves = Waves(grid=64, frames=8, batch=2)
    uninterrupted = generate(waves, 120, 0, tmp_path / "reference.h5")
    assert generate(waves, 120, 0, path).fingerprint == uninterrupted.fingerprint
    assert path.read_bytes() == (tmp_path / "reference.h5").read_bytes()


# --- the real simulators

SMALL = {
    "darcy": Darcy(grid=21),
    "vorticity": replace(DEMO, grid=32, stored=16, frames=2, burn_in=0.0),
    "turbulence": replace(IT3D, grid=8, frames=2, steps_per_frame=5),
    "smoke": replace(SMOKE3D, grid=18, frames=2, warmup=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_simulators_give_the_same_values_stored_resumed_and_streamed(tmp_path: Path, name: str) -> None:
    simulator = SMALL[name]
    generate(simulator, 1, SEED, tmp_path / "a.h5")
    resumed = generate(simulator, 3, SEED, tmp_path / "a.h5")
    uninterrupted = generate(simulator, 3, SEED, tmp_path / "b.h5")
    assert (resumed.present, resumed.fingerprint) == (1, uninterrupted.fingerprint)
    with open_store(tmp_path / "a.h5") as reader:
        assert reader.header.source == name
        np.testing.assert_array_equal(Stream(simulator, SEED)[2].numpy(), reader[2])
        assert not np.array_equal(reader[1], reader[2])
    summary = summarise(tmp_path / "a.h5")
    assert summary.damaged == () and not any(field.constant or field.nans for field in summary.fields)


# --- stream


def test_stream_equals_store(reference: Path) -> None:
    stream = Stream(WAVES, SEED)
    with open_store(reference) as reader:
        for index in (5, 0, 7):
            np.testing.assert_array_equal(stream[index].numpy(), reader[index])
        np.testing.assert_array_equal(torch.stack(list(islice(stream, COUNT))).numpy(), reader[:])
        np.testing.assert_array_equal(stream.batch([6, 2]).numpy(), reader[:][[6, 2]])
        assert stream.header.difference(reader.header) is None
    assert stream.layout.fields == ("height", "slope")


def test_stream_with_count_is_a_sequence() -> None:
    stream = Stream(WAVES, SEED, count=5)
    assert len(stream) == 5 and len(list(stream)) == 5
    assert torch.equal(stream[-1], Stream(WAVES, SEED)[4])
    with pytest.raises(IndexError):
        stream[5]
    loaded = torch.cat(list(DataLoader(stream, batch_size=2)))
    assert torch.equal(loaded, torch.stack(list(stream)))


def test_stream_without_count_is_endless() -> None:
    stream = Stream(WAVES, SEED)
    assert torch.equal(stream[10**9], stream[10**9])
    assert not torch.equal(stream[10**9], stream[0])
    with pytest.raises(TypeError):
        len(stream)
    with pytest.raises(IndexError):
        stream[-1]
    with pytest.raises(ValueError, match="at least 1"):
        Stream(WAVES, SEED, count=0)
