#!/usr/bin/env bash
# An engineer has a flow solver of her own, with files of its own kind: axes (x, y, time, field), walls in y.
set -euo pipefail
start=$SECONDS

# Her solver: viscous Burgers flow in a channel, periodic in x, with walls at rest in y. One of 18 runs has blown up.
cat > solver.py <<'END'
from pathlib import Path

import numpy as np

nx, ny, dt, viscosity = 32, 24, 0.001, 0.02
dx, dy = 1 / nx, 1 / (ny - 1)
x, y = np.meshgrid(np.arange(nx) * dx, np.arange(ny) * dy, indexing="ij")
random = np.random.default_rng(0)


def slope(f, axis, h):
    return (np.roll(f, -1, axis) - np.roll(f, 1, axis)) / (2 * h)


def bend(f):
    return sum((np.roll(f, -1, a) - 2 * f + np.roll(f, 1, a)) / h**2 for a, h in ((-2, dx), (-1, dy)))


def flow():
    a, b, c, d = random.uniform(-1, 1, 4)
    bump = np.sin(np.pi * y)
    u = bump * (1 + a * np.sin(2 * np.pi * x) + b * np.cos(2 * np.pi * x))
    v = bump * (c * np.sin(2 * np.pi * x) + d * np.cos(4 * np.pi * x)) / 2
    frames = []
    for step in range(401):
        if step % 25 == 0:
            frames.append(np.stack([u, v], -1))
        change = [-u * slope(f, -2, dx) - v * slope(f, -1, dy) + viscosity * bend(f) for f in (u, v)]
        u, v = u + dt * change[0], v + dt * change[1]
        u[:, [0, -1]] = v[:, [0, -1]] = 0
    return np.stack(frames, axis=2).astype(np.float32)  # (x, y, time, field)


for folder, count in (("flows", 18), ("unseen", 4)):
    Path(folder).mkdir()
    for number in range(count):
        np.save(f"{folder}/run{number:02}.npy", flow())
broken = np.load("flows/run07.npy")
broken[:, :, -1] = np.nan
np.save("flows/run07.npy", broken)
np.save("today.npy", np.load("unseen/run03.npy")[:, :, :4])
steady = np.random.default_rng(1).normal(size=(12, 16, 16, 2))
np.savez("pairs.npz", a=steady[..., 0], p=steady.cumsum(axis=1)[..., 1])
END

say() { printf '\n$ %s\n' "$*"; "$@"; }
refused() { printf '\n$ %s\n' "$*"; if "$@" 2>&1; then echo "this should have been refused"; exit 1; fi; }
python solver.py

# The broken run is named; a misspelt setting is answered; a file that may be steady is asked about.
reading=(--axes x,y,time,field --fields u,v --boundary periodic,wall --dt 0.025 --units m/s,m/s --test-data unseen)
small=(--history 4 --block 1 --horizon 10 --set model.width=24 --set model.depth=2 --set train.updates=200)
refused sigmasolver train --data flows "${reading[@]}" "${small[@]}" --out runs/channel
refused sigmasolver train --data flows "${reading[@]}" --set model.widht=24 --out runs/channel
refused sigmasolver train --data pairs.npz --out runs/pairs

say sigmasolver train --data flows "${reading[@]}" "${small[@]}" --skip-bad --out runs/channel
say sigmasolver evaluate runs/channel
say sigmasolver forecast runs/channel --input today.npy --steps 13 --out prediction.nc
say sigmasolver export runs/channel --to onnx --out channel.onnx
say sigmasolver diagnose runs/channel --only maps
say sigmasolver report runs/channel --units time=s --units length=m --out channel.html
say sigmasolver evaluate runs/channel --data unseen
say sigmasolver train --data pairs.npz --steady --fields a,p --targets p --test 0 --out runs/pairs \
  --set train.updates=20 --set model.width=16 --set model.depth=1
times > times.txt
cpu=$(awk 'END { split($1, t, "[ms]"); printf "%d", 60 * t[1] + t[2] }' times.txt)
printf '\nThe engineer took %d seconds, %d of CPU time.\n' $((SECONDS - start)) "$cpu"
