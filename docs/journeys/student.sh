#!/usr/bin/env bash
# A student follows "Ten minutes" after the install: a pretrained model, then a first forecast of his own.
set -euo pipefail
start=$SECONDS
say() { printf '\n$ %s\n' "$*"; "$@"; }

say sigmasolver --help
say sigmasolver forecast darcy
say sigmasolver simulate demo --count 24 --set stored=32 --out flow.h5
say sigmasolver inspect flow.h5
say sigmasolver train --data flow.h5 --history 4 --block 1 --horizon 5 --out runs/first \
  --set model.width=32 --set model.depth=2 --set train.updates=300
say sigmasolver evaluate runs/first
python - <<'END'
import numpy as np

import sigmasolver

with sigmasolver.open("flow.h5") as store:
    np.save("today.npy", store[len(store) - 1][:4])
END
say sigmasolver forecast runs/first --input today.npy --steps 10 --out prediction.npy
times > times.txt
cpu=$(awk 'END { split($1, t, "[ms]"); printf "%d", 60 * t[1] + t[2] }' times.txt)
printf '\nThe student took %d seconds, %d of CPU time.\n' $((SECONDS - start)) "$cpu"
