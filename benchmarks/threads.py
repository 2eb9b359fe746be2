"""Updates on a CPU with other processes on its cores: compare the wait policies of OpenMP threads.

    python benchmarks/threads.py [--busy 0,2,4] [--rounds 3] [--out results/threads.jsonl]

Each policy trains the demo's model in its own process, because OpenMP reads its environment once: `default`, torch
without any setting; `passive`, as the command line sets it (OMP_WAIT_POLICY=PASSIVE: a waiting thread sleeps); `short`,
spinning for about 0.1 ms before sleeping; `single`, one thread. Meanwhile `--busy` processes run busy loops. The
policies are interleaved; medians over the rounds, and ratios to `default` of the same rounds. A digest of the weights
after the updates shows whether a policy changes the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "short": {"GOMP_SPINCOUNT": "10000"},
    "single": {"OMP_NUM_THREADS": "1"},
}
OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WARM_UP = 3


def train(updates: int) -> dict[str, object]:
    """Train in this process; return the seconds per update, and a digest of the final weights."""
    import torch

    from sigmasolver.cli.demo_flow import Size, _recipes
    from sigmasolver.ops.memory import keep_freed_memory
    from sigmasolver.runs import provenance
    from sigmasolver.train.dry_run import DryRun
    from sigmasolver.train.engine import Execution

    keep_freed_memory()
    update = DryRun(next(_recipes(Size())), Execution())
    for _ in range(WARM_UP):
        update()
    start = time.perf_counter()
    for _ in range(updates):
        update()
    seconds = (time.perf_counter() - start) / updates
    digest = hashlib.sha256()
    for tensor in update.stepper.model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    device = torch.device("cpu")
    return {"seconds": seconds, "weights": digest.hexdigest()[:16], **provenance(device)}


def measure(policy: str, updates: int) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    command = [sys.executable, __file__, "--train", "--updates", str(updates)]
    result = subprocess.run(
        command, env={**environment, **POLICIES[policy]}, capture_output=True, text=True, check=True
    )
    facts: dict[str, object] = json.loads(result.stdout)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="0,2,4", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--train", action="store_true", help="train in this process and print; the others call it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.updates)))
        return
    from measure import append_rows

    for busy in map(int, args.busy.split(",")):
        busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            rounds = [{policy: measure(policy, args.updates) for policy in POLICIES} for _ in range(args.rounds)]
        finally:
            for process in busy_processes:
                process.kill()
                process.wait()
        rows: list[dict[str, object]] = []
        for policy in POLICIES:
            seconds = statistics.median(float(str(result[policy]["seconds"])) for result in rounds)
            default_seconds = statistics.median(float(str(result["default"]["seconds"])) for result in rounds)
            same = all(result[policy]["weights"] == result["default"]["weights"] for result in rounds)
            case = {"subject": "threads", "case": "demo", "busy": busy, "policy": policy, "rounds": args.rounds}
            facts = {name: value for name, value in rounds[0][policy].items() if name not in ("seconds", "weights")}
            rows.append(
                {**case, "seconds": seconds, "over_default": seconds / default_seconds, "same_weights": same, **facts}
            )
            timing = f"{1e3 * seconds:8.1f} ms an update, {seconds / default_seconds:5.2f} of default"
            print(f"{busy} busy  {policy:8} {timing}, weights {'the same' if same else 'differ'}", flush=True)
        if args.out is not None:
            append_rows(args.out, rows)


if __name__ == "__main__":
    main()
