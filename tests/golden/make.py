"""Write the golden file: `python -m tests.golden.make [FILE]`, on one CPU thread, in about a minute."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.training import CASES, largest_changes, machine, measure_models, measure_task

GOLDEN = Path(__file__).with_name("training.json")
PERTURBATIONS = (1e-7, 2e-7, 4e-7)
"""Standard deviations of noise on the normalised inputs about as large as the rounding of float32."""


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    with tempfile.TemporaryDirectory() as folder:
        tasks = {name: measure_task(name, Path(folder, name)) for name in CASES}
        models = measure_models(Path(folder, "models"))
        perturbed = [measure_models(Path(folder, f"noise-{noise}"), noise) for noise in PERTURBATIONS]
    record = {"command": "python -m tests.golden.make", "machine": machine(), "tasks": tasks, "models": models}
    record["rounding"] = largest_changes(models, perturbed)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
