"""Triton's interpreter without work that it does over and over; the numbers it computes are the same."""

from dataclasses import replace

import pytest
import torch

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


def _patch_each_function_once(patch):
    """`triton.language` is patched for interpretation in every call of an inlined function, and stays so here."""
    done = set()

    def patch_once(function):
        if function not in done:
            done.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    return patch_once


def _cached_by_name(numpy_type):
    """The NumPy type of a Triton type: its table is built in every call."""
    known = {}

    def cached(dtype):
        if dtype.name not in known:
            known[dtype.name] = numpy_type(dtype)
        return known[dtype.name]

    return cached


if interpreter is not None and not torch.cuda.is_available():
    interpreter._patch_lang = _patch_each_function_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
    # Whether 32 bits hold every index: they do in tensors as small as these.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


@pytest.fixture
def short_loops(monkeypatch):
    """Weight gradients of a convolution in one turn of their loop, of a wider tile; on a GPU as ever.

    A turn costs the interpreter as much for four runs of points as for sixteen, and small grids have no more. That the
    loop itself is right shows where this is not used: `test_convolutions` in two axes, and over several chunks.
    """
    if not torch.cuda.is_available():
        from sigmasolver.ops.fused import tuning

        monkeypatch.setattr(tuning, "WEIGHT_GRADIENT_RUNS", 16)
        monkeypatch.setattr(tuning, "SHORTEST_CHUNK", 16)
