"""Slow reference implementations of the baselines in float64 NumPy: one sample, point by point, weights by name."""

import itertools
import math

import numpy as np


class Weights:
    """The arrays of a state dict by name; `weights / "mlp"` selects those under a prefix."""

    def __init__(self, state, prefix=""):
        self.state, self.prefix = state, prefix

    def __truediv__(self, name):
        return Weights(self.state, f"{self.prefix}{name}.")

    def __getitem__(self, name):
        return self.state[self.prefix + name].numpy()


def softmax(x):
    """Softmax of a vector."""
    e = np.exp(x - x.max())
    return e / e.sum()


def gelu(x):
    return np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)(x)


def affine(x, w):
    return x @ w["weight"].T + w["bias"]


def perceptron(x, w):
    return affine(gelu(affine(x, w / "0")), w / "2")


def layer_norm(x, w):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def convolution(x, w, padding):
    """(*grid, C): a 3^d convolution; "zeros" or "circular" padding per axis."""
    grid, out = x.shape[:-1], np.zeros_like(x)
    for point in np.ndindex(*grid):
        out[point] = w["bias"]
        for cell in itertools.product(range(3), repeat=len(grid)):
            neighbour = [p + c - 1 for p, c in zip(point, cell, strict=True)]
            neighbour = [t % n if end == "circular" else t for t, n, end in zip(neighbour, grid, padding, strict=True)]
            if all(0 <= t < n for t, n in zip(neighbour, grid, strict=True)):
                out[point] += w["weight"][(..., *cell)] @ x[tuple(neighbour)]
    return out


def positions(grid, config):
    """(*grid, ...): distances to the reference lattice, last axis fastest, or the coordinates."""
    lattice = list(itertools.product(np.linspace(0, 1, config.lattice), repeat=len(grid)))
    rows = []
    for point in itertools.product(*(np.linspace(0, 1, n) for n in grid)):
        rows.append(
            point if config.options.positions == "coordinates" else [math.dist(point, other) for other in lattice]
        )
    return np.array(rows).reshape(*grid, -1)


def solver(model, x, block):
    """(*grid, C_in) -> (*grid, C_out) through `block(H, weights, config)`, block by block."""
    config, weights = model.config, Weights(model.state_dict())
    H = perceptron(np.concatenate((positions(x.shape[:-1], config), x), -1), weights / "lift") + weights["offset"]
    for index in range(config.depth):
        H = block(H, weights / f"blocks.{index}", config)
    return affine(layer_norm(H, weights / "norm"), weights / "readout")


def attention_block(attention):
    """The block of Transolver and LinearNO with `attention(Y, weights, config)`."""

    def block(H, w, config):
        H = H + attention(layer_norm(H, w / "attention.norm"), w / "attention.operator", config)
        return H + perceptron(layer_norm(H, w / "mlp.norm"), w / "mlp.operator")

    return block


def factorised(H, w, config):
    """F-FNO: the FFT of every line along every axis, mode by mode."""
    total = np.zeros_like(H)
    for axis, modes in enumerate(config.modes_per_axis):
        spectrum = np.fft.rfft(H, axis=axis, norm="ortho")
        filtered = np.zeros_like(spectrum)
        parts = w[f"spectral.weights.{axis}"]
        for k in range(min(modes, spectrum.shape[axis])):
            line = (slice(None),) * axis + (k,)
            filtered[line] = spectrum[line] @ (parts[k, ..., 0] + 1j * parts[k, ..., 1])
        total += np.fft.irfft(filtered, n=H.shape[axis], axis=axis, norm="ortho")
    inner = np.maximum(affine(total, w / "feed_forward.0"), 0)
    return H + layer_norm(affine(inner, w / "feed_forward.2"), w / "norm")


def heads_of(x, config):
    """(*grid, C) -> one (N, D) array per head."""
    return np.split(x.reshape(-1, x.shape[-1]), config.heads, axis=-1)


def physics_attention(update):
    """Transolver: slice, update the slices, deslice."""

    def attention(Y, w, config):
        M, outputs = config.slices, []
        routed = heads_of(convolution(Y, w / "routing_path", config.padding), config)
        features = heads_of(convolution(Y, w / "feature_path", config.padding), config)
        for R, F, tau in zip(routed, features, w["routing.temperature"], strict=True):
            P = np.array([softmax(affine(point, w / "routing.project") / min(max(tau, 0.1), 5)) for point in R])
            Z = np.array([sum(P[n, m] * F[n] for n in range(len(F))) / (sum(P[:, m]) + 1e-5) for m in range(M)])
            outputs.append(P @ updated(Z, w / "update", update))
        return affine(np.concatenate(outputs, -1), w / "project").reshape(Y.shape)

    return attention


def updated(Z, w, update):
    if update == "keep":
        return Z
    query, key, value = (w / "attention" / name for name in ("query", "key", "value"))
    q, k, v = (Z @ matrix["weight"].T for matrix in (query, key, value))
    delta = np.array([softmax(k @ row / math.sqrt(Z.shape[-1])) @ v for row in q])
    return delta if update == "replace" else Z + w["gamma"] * delta


def linear_attention(local):
    """LinearNO with the explicit (N, N) attention matrix."""

    def attention(Y, w, config):
        U = convolution(Y, w / "embed", config.padding) if local else affine(Y, w / "embed")
        outputs = []
        for h, u in enumerate(heads_of(U, config)):
            tau = {
                side: np.clip(w[f"{side}_temperature.value"][h], 0.01, 1) if local else 1 for side in ("query", "key")
            }
            q, k = (u @ w[f"{side}.weight"].T / tau[side] for side in ("query", "key"))
            Q, K = np.array([softmax(row) for row in q]), np.array([softmax(column) for column in k.T]).T
            outputs.append((Q @ K.T) @ (u @ w["value.weight"].T))
        out = np.concatenate(outputs, -1)
        return (perceptron if local else affine)(out, w / "project").reshape(Y.shape)

    return attention
