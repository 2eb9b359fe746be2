"""Create the folder of a pretrained model from a finished run and a store of unseen trajectories.

sigmasolver simulate darcy --count 40 --seed 12345 --out unseen.h5
python benchmarks/ship.py runs/darcy-transolver-sigma-42 --windows unseen.h5 --others runs/darcy-transolver-sigma-4[34]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sigmasolver.pretrained
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.model_cards.make import make_folder
from sigmasolver.runs import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the finished run")
    parser.add_argument("--windows", type=Path, required=True, help="a store simulated with another seed")
    parser.add_argument("--count", type=int, default=16, help="how many windows are shipped")
    parser.add_argument("--training-seed", type=int, default=0, help="what the training data were simulated with")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="the same recipe with other seeds")
    parser.add_argument("--note", default="", help="a sentence for the card, for instance how settings were chosen")
    parser.add_argument("--out", type=Path, help="the folder; none: the package's own, named after the task")
    args = parser.parse_args()
    run = Run(args.run)
    out = args.out or Path(sigmasolver.pretrained.__file__).parent / load_recipe(run).task.name
    make_folder(run, out, args.windows, args.count, args.training_seed, [Run(path) for path in args.others], args.note)
    print((out / "card.md").read_text())


if __name__ == "__main__":
    main()
