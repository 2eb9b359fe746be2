"""Updates on a CPU whose cores are also wanted by others: how OpenMP's threads should wait for each other.

    python benchmarks/threads.py [--busy 0,2,4] [--rounds 3] [--out results/threads.jsonl]

Each policy trains the demo's model in a process of its own, because OpenMP reads its environment once: `default`, as
torch is without any setting; `passive`, as the command line sets it (OMP_WAIT_POLICY=PASSIVE: a waiting thread sleeps);
`short`, a spin of about 0.1 ms before it sleeps; `single`, one thread. `--busy` processes that only count keep the
cores busy meanwhile. The policies take turns; median over the rounds, and ratios to `default` of the same rounds. A
digest of the weights after the updates shows whether a policy changes numbers.
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
NAMES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WARM_UP = 3


def train(updates: int) -> dict[str, object]:
    """Seconds of one update in this process, and a digest of the weights after all of them."""
    import torch

    from sigmasolver.cli.demo_flow import Size, _recipes
    from sigmasolver.ops.memory import keep_freed_memory
    from sigmasolver.runs import provenance
    from sigmasolver.train.dry_run import Rehearsal
    from sigmasolver.train.engine import Execution

    keep_freed_memory()
    update = Rehearsal(next(_recipes(Size())), Execution())
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
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    words = [sys.executable, __file__, "--train", "--updates", str(updates)]
    done = subprocess.run(words, env={**environment, **POLICIES[policy]}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="0,2,4", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--train", action="store_true", help="train in this process and print; the others call it")
    parser.add_argument("--out", type=Path)
    choices = parser.parse_args()
    if choices.train:
        print(json.dumps(train(choices.updates)))
        return
    from measure import append_rows

    for busy in map(int, choices.busy.split(",")):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            found = [{policy: measure(policy, choices.updates) for policy in POLICIES} for _ in range(choices.rounds)]
        finally:
            for other in others:
                other.kill()
                other.wait()
        rows: list[dict[str, object]] = []
        for policy in POLICIES:
            seconds = statistics.median(float(str(one[policy]["seconds"])) for one in found)
            plain = statistics.median(float(str(one["default"]["seconds"])) for one in found)
            same = all(one[policy]["weights"] == one["default"]["weights"] for one in found)
            what = {"subject": "threads", "case": "demo", "busy": busy, "policy": policy, "rounds": choices.rounds}
            facts = {name: value for name, value in found[0][policy].items() if name not in ("seconds", "weights")}
            rows.append({**what, "seconds": seconds, "over_default": seconds / plain, "same_weights": same, **facts})
            shown = f"{1e3 * seconds:8.1f} ms an update, {seconds / plain:5.2f} of default"
            print(f"{busy} busy  {policy:8} {shown}, weights {'the same' if same else 'differ'}", flush=True)
        if choices.out is not None:
            append_rows(choices.out, rows)


if __name__ == "__main__":
    main()
