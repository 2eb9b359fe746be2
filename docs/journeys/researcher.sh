#!/usr/bin/env bash
# A researcher has a network of his own and wants it measured beside Transolver-σ, with his own loss and optimiser.
set -euo pipefail
start=$SECONDS

cat > mine.py <<'END'
import torch
from torch import nn

import sigmasolver
from sigmasolver.train.objectives import register_loss
from sigmasolver.train.optimisers import register_optimiser


class Dilated(nn.Module):
    """Circular convolutions of growing reach, which predict the change of the last frame."""

    def __init__(self, config):
        super().__init__()
        self.outputs = config.out_channels
        widths = [config.in_channels, *[config.width] * config.depth, config.out_channels]
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=2**place, dilation=2**place, padding_mode="circular")
            for place, (before, after) in enumerate(zip(widths, widths[1:]))
        )

    def forward(self, x):
        hidden = x.movedim(-1, 1)
        *inner, last = self.layers
        for layer in inner:
            hidden = nn.functional.gelu(layer(hidden))
        return x[..., -self.outputs :] + last(hidden).movedim(1, -1)


def huber(recipe, normaliser):
    def loss(prediction, truth):
        error = normaliser.encode(prediction) - normaliser.encode(truth)
        return nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none").flatten(1).mean(1)

    return loss


sigmasolver.register_model("dilated", Dilated)
register_loss("huber", huber)
register_optimiser("radam", lambda parameters, train: torch.optim.RAdam(parameters))
END

say() { printf '\n$ %s\n' "$*"; "$@"; }
refused() { printf '\n$ %s\n' "$*"; if "$@" 2>&1; then echo "this should have been refused"; exit 1; fi; }
say sigmasolver simulate demo --count 24 --set stored=32 --out flow.h5

# One recipe for both models, as a file that can be kept and edited.
common=(--history 4 --block 1 --horizon 5 --set train.updates=120 --set model.width=24 --set model.depth=2)
printf '\n$ sigmasolver train --data flow.h5 %s --print-config > flow.toml\n' "${common[*]}"
sigmasolver train --data flow.h5 "${common[@]}" --print-config > flow.toml
say sigmasolver plan --config flow.toml --plugin mine.py --model dilated
say sigmasolver train --config flow.toml --data flow.h5 --out runs/sigma
say sigmasolver train --config flow.toml --data flow.h5 --plugin mine.py --model dilated \
  --set train.loss=huber --set train.optimiser=radam --out runs/dilated
say cat runs/dilated/origins.json
say sigmasolver evaluate runs/sigma runs/dilated --plugin mine.py
say sigmasolver diagnose runs/dilated --plugin mine.py --windows 4 --only decomposition,trust,maps
say sigmasolver report runs/sigma runs/dilated --out both.html
say sigmasolver export runs/dilated --plugin mine.py --to torch-export --out dilated.pt2

# Without his code a command says what is missing.
refused sigmasolver evaluate runs/dilated --windows 5
times > times.txt
cpu=$(awk 'END { split($1, t, "[ms]"); printf "%d", 60 * t[1] + t[2] }' times.txt)
printf '\nThe researcher took %d seconds, %d of CPU time.\n' $((SECONDS - start)) "$cpu"
