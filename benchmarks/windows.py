"""Windows of RealPDEBench's Arrow files: memory-mapped slices against access to whole rows, and the memory of workers.

    python benchmarks/windows.py                                      # rows as long as the published ones, 0.8 GB
    python benchmarks/windows.py --frames 400 --windows 200           # smaller

Both ways give the same windows of the same files, in one process and one run; a plain copy of as many bytes is the
least that a window can cost. Windows are read twice: the first time the system maps their pages, which the disk cache
holds, into the process. Then workers of a DataLoader read many windows; their memory is what belongs to them alone
(`Anonymous` of Linux), since mapped pages can be dropped at any time and count for nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
import pyarrow
import torch
from measure import append_rows
from torch.utils.data import DataLoader, Dataset, Subset

from sigmasolver.data.formats import open_data
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Pair, Windows, WindowSpec
from sigmasolver.runs import provenance

FIELDS = ("velocity_x", "velocity_y")
GRID = (64, 128)
SPAN = 40


def write(folder: Path, rows: int, frames: int) -> Path:
    """A scenario of random trajectories, one shard for each."""
    place = folder / "cylinder" / "hf_dataset" / "real"
    place.mkdir(parents=True)
    binary = {name: pyarrow.binary() for name in ("u", "v")}
    lengths = {f"shape_{axis}": pyarrow.int32() for axis in "thw"}
    schema = pyarrow.schema({"sim_id": pyarrow.string()} | binary | lengths)
    rng = np.random.default_rng(0)
    for number in range(rows):
        fields = {name: rng.standard_normal((frames, *GRID), dtype=np.float32).tobytes() for name in ("u", "v")}
        row = {"sim_id": f"{1000 + number}.h5", "shape_t": frames, "shape_h": GRID[0], "shape_w": GRID[1], **fields}
        with pyarrow.ipc.new_stream(str(place / f"data-{number:05}-of-{rows:05}.arrow"), schema) as stream:
            stream.write_batch(pyarrow.RecordBatch.from_pylist([row], schema=schema))
    return folder / "cylinder"


def by_row(place: Path) -> Callable[[int, int], torch.Tensor]:
    """Windows by access to a row, which makes Python objects of all its columns."""
    shards = sorted((place / "hf_dataset" / "real").glob("*.arrow"))
    tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all() for path in shards]

    def window(trajectory: int, first: int) -> torch.Tensor:
        row = tables[trajectory].slice(0, 1).to_pylist()[0]
        shape = [row[f"shape_{axis}"] for axis in "thw"]
        fields = [np.frombuffer(row[name], "<f4").reshape(shape)[first : first + SPAN] for name in ("u", "v")]
        return torch.from_numpy(np.stack(fields, axis=-1))

    return window


def copied(data: Reader) -> Callable[[int, int], list[np.ndarray]]:
    """The bytes of a window, copied as they lie."""

    def window(trajectory: int, first: int) -> list[np.ndarray]:
        return [np.array(one) for one in data.fields(trajectory, first, first + SPAN, range(len(FIELDS))) or ()]

    return window


def seconds(read: Callable[[int, int], object], places: list[tuple[int, int]]) -> float:
    """Of one window: the median over these places."""
    times = []
    for place in places:
        began = time.perf_counter()
        read(*place)
        times.append(time.perf_counter() - began)
    return median(times)


def own_memory(process: int) -> float:
    """Megabytes that belong to a process alone."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(one) for path in tasks for one in path.read_text().split()]


def memory_of_workers(windows: Windows, count: int, workers: int) -> list[tuple[int, float]]:
    """(windows read, megabytes of the largest worker) ten times while `count` windows are read."""
    chosen = torch.randint(len(windows), (count,), generator=torch.Generator().manual_seed(0)).tolist()
    before = set(children())
    some = Subset(cast("Dataset[Pair]", windows), chosen)
    loader = DataLoader(some, num_workers=workers, batch_size=1)
    seen = []
    for number, _ in enumerate(loader, start=1):
        if number % max(1, count // 10) == 0 and number < count:
            mine = [one for one in children() if one not in before]
            seen.append((number, max(own_memory(one) for one in mine)))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=3990, help="frames of a trajectory; default: as published")
    parser.add_argument("--rows", type=int, default=3, help="trajectories")
    parser.add_argument("--windows", type=int, default=10_000, help="windows that the workers read")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON")
    asked = parser.parse_args()
    spec = WindowSpec(FIELDS, FIELDS, SPAN // 2, SPAN // 2)
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), asked.rows, asked.frames)
        with open_data(place) as data:
            windows = Windows(data, range(len(data)), spec)
            slow = by_row(place)

            def fast(trajectory: int, first: int) -> Pair:
                return windows[trajectory * (asked.frames - SPAN + 1) + first]

            generator = np.random.default_rng(1)
            places = [
                (int(generator.integers(asked.rows)), int(generator.integers(asked.frames - SPAN + 1)))
                for _ in range(200)
            ]
            assert torch.equal(slow(*places[0]), torch.cat(fast(*places[0])))
            mapped, again, copy = seconds(fast, places), seconds(fast, places), seconds(copied(data), places)
            rows = seconds(slow, places[:10])
            ratio = rows / mapped
            print(f"a window of {SPAN} frames: {1e3 * mapped:.2f} ms mapped, {1e3 * rows:.0f} ms by row: {ratio:.0f}×")
            print(f"once its pages are mapped: {1e3 * again:.2f} ms; a plain copy of its bytes: {1e3 * copy:.2f} ms")
            memory = memory_of_workers(windows, asked.windows, asked.workers)
            for number, size in memory:
                print(f"{number:6} windows, {asked.workers} workers: {size:.0f} MB in the largest")
    facts = {**provenance(torch.device("cpu")), "frames": asked.frames, "cores": os.cpu_count()}
    if asked.out is not None:
        times = {"mapped_ms": 1e3 * mapped, "again_ms": 1e3 * again, "copy_ms": 1e3 * copy, "row_ms": 1e3 * rows}
        found = {**times, "ratio": ratio, "worker_megabytes": memory}
        append_rows(asked.out, [{**facts, **found}])


if __name__ == "__main__":
    main()
