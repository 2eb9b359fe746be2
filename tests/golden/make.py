"""Write the golden file: `python -m tests.golden.make [FILE]`, on one CPU thread, in about 15 s."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.training import CASES, machine, measure_models, measure_task

GOLDEN = Path(__file__).with_name("training.json")


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    with tempfile.TemporaryDirectory() as folder:
        tasks = {name: measure_task(name, Path(folder, name)) for name in CASES}
        models = measure_models(Path(folder, "models"))
    record = {"command": "python -m tests.golden.make", "machine": machine(), "tasks": tasks, "models": models}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
