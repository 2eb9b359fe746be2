"""Windows of RealPDEBench's Arrow files: memory-mapped slices compared with reading full rows, and worker memory.

    python benchmarks/windows.py                                      # rows as long as the published ones, 0.8 GB
    python benchmarks/windows.py --frames 400 --windows 200           # smaller

Both ways give the same windows of the same files, in one process and one run; a plain copy of the same number of bytes
is the lower bound. Windows are read twice: the first time the system maps their pages from the page cache into the
process. Then the workers of a DataLoader read many windows; their memory is their private memory (`Anonymous` on
Linux), since mapped pages can be evicted at any time.
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
    """Write a scenario of random trajectories, one shard each."""
    shard_folder = folder / "cylinder" / "hf_dataset" / "real"
    shard_folder.mkdir(parents=True)
    binary = {name: pyarrow.binary() for name in ("u", "v")}
    lengths = {f"shape_{axis}": pyarrow.int32() for axis in "thw"}
    schema = pyarrow.schema({"sim_id": pyarrow.string()} | binary | lengths)
    rng = np.random.default_rng(0)
    for index in range(rows):
        fields = {name: rng.standard_normal((frames, *GRID), dtype=np.float32).tobytes() for name in ("u", "v")}
        row = {"sim_id": f"{1000 + index}.h5", "shape_t": frames, "shape_h": GRID[0], "shape_w": GRID[1], **fields}
        with pyarrow.ipc.new_stream(str(shard_folder / f"data-{index:05}-of-{rows:05}.arrow"), schema) as stream:
            stream.write_batch(pyarrow.RecordBatch.from_pylist([row], schema=schema))
    return folder / "cylinder"


def by_row(scenario: Path) -> Callable[[int, int], torch.Tensor]:
    """Read windows through full rows, which converts all columns to Python objects."""
    shards = sorted((scenario / "hf_dataset" / "real").glob("*.arrow"))
    tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all() for path in shards]

    def window(trajectory: int, first: int) -> torch.Tensor:
        row = tables[trajectory].slice(0, 1).to_pylist()[0]
        shape = [row[f"shape_{axis}"] for axis in "thw"]
        fields = [np.frombuffer(row[name], "<f4").reshape(shape)[first : first + SPAN] for name in ("u", "v")]
        return torch.from_numpy(np.stack(fields, axis=-1))

    return window


def copied(data: Reader) -> Callable[[int, int], list[np.ndarray]]:
    """Copy the bytes of a window as stored."""

    def window(trajectory: int, first: int) -> list[np.ndarray]:
        return [np.array(field) for field in data.fields(trajectory, first, first + SPAN, range(len(FIELDS))) or ()]

    return window


def seconds(read: Callable[[int, int], object], positions: list[tuple[int, int]]) -> float:
    """Median time of one window over these positions."""
    times = []
    for position in positions:
        start = time.perf_counter()
        read(*position)
        times.append(time.perf_counter() - start)
    return median(times)


def own_memory(process: int) -> float:
    """Private memory of a process in megabytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in tasks for pid in path.read_text().split()]


def memory_of_workers(windows: Windows, count: int, workers: int) -> list[tuple[int, float]]:
    """(windows read, megabytes of the largest worker) ten times while `count` windows are read."""
    indices = torch.randint(len(windows), (count,), generator=torch.Generator().manual_seed(0)).tolist()
    before = set(children())
    subset = Subset(cast("Dataset[Pair]", windows), indices)
    loader = DataLoader(subset, num_workers=workers, batch_size=1)
    samples = []
    for count_read, _ in enumerate(loader, start=1):
        if count_read % max(1, count // 10) == 0 and count_read < count:
            pids = [pid for pid in children() if pid not in before]
            samples.append((count_read, max(own_memory(pid) for pid in pids)))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=3990, help="frames of a trajectory; default: as published")
    parser.add_argument("--rows", type=int, default=3, help="trajectories")
    parser.add_argument("--windows", type=int, default=10_000, help="windows that the workers read")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON")
    args = parser.parse_args()
    spec = WindowSpec(FIELDS, FIELDS, SPAN // 2, SPAN // 2)
    with tempfile.TemporaryDirectory() as folder:
        scenario = write(Path(folder), args.rows, args.frames)
        with open_data(scenario) as data:
            windows = Windows(data, range(len(data)), spec)
            read_row = by_row(scenario)

            def read_mapped(trajectory: int, first: int) -> Pair:
                return windows[trajectory * (args.frames - SPAN + 1) + first]

            generator = np.random.default_rng(1)
            positions = [
                (int(generator.integers(args.rows)), int(generator.integers(args.frames - SPAN + 1)))
                for _ in range(200)
            ]
            assert torch.equal(read_row(*positions[0]), torch.cat(read_mapped(*positions[0])))
            mapped, again, copy = (
                seconds(read_mapped, positions),
                seconds(read_mapped, positions),
                seconds(copied(data), positions),
            )
            rows = seconds(read_row, positions[:10])
            ratio = rows / mapped
            print(f"a window of {SPAN} frames: {1e3 * mapped:.2f} ms mapped, {1e3 * rows:.0f} ms by row: {ratio:.0f}×")
            print(f"once its pages are mapped: {1e3 * again:.2f} ms; a plain copy of its bytes: {1e3 * copy:.2f} ms")
            memory = memory_of_workers(windows, args.windows, args.workers)
            for number, size in memory:
                print(f"{number:6} windows, {args.workers} workers: {size:.0f} MB in the largest")
    facts = {**provenance(torch.device("cpu")), "frames": args.frames, "cores": os.cpu_count()}
    if args.out is not None:
        times = {"mapped_ms": 1e3 * mapped, "again_ms": 1e3 * again, "copy_ms": 1e3 * copy, "row_ms": 1e3 * rows}
        results = {**times, "ratio": ratio, "worker_megabytes": memory}
        append_rows(args.out, [{**facts, **results}])


if __name__ == "__main__":
    main()
