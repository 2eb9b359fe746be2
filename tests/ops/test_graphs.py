"""Capture of CUDA graphs while objects of earlier captures await garbage collection."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sigmasolver.ops.graphs import capture, no_garbage_collection


class Node:
    """Part of a reference cycle, so that only the garbage collector frees it."""

    def __init__(self, payload: object = None) -> None:
        self.payload, self.itself = payload, self


def test_no_garbage_collection_collects_on_entry_and_not_inside() -> None:
    before = weakref.ref(Node())
    assert before() is not None
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with no_garbage_collection():
            assert before() is None
            during = weakref.ref(Node())
            _ = [Node() for _ in range(100)]
            assert during() is not None
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()


def test_no_garbage_collection_keeps_a_disabled_collector_disabled() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture_survives_an_old_graph_in_a_reference_cycle() -> None:
    x = torch.ones(8, device="cuda")
    old = torch.cuda.CUDAGraph()
    with capture(old):
        x + 1
    Node(old)
    del old
    new = torch.cuda.CUDAGraph()
    gc.set_threshold(1)
    try:
        with capture(new):
            _ = [Node() for _ in range(100)]
            y = x + 2
    finally:
        gc.set_threshold(700, 10, 10)
    new.replay()
    assert torch.equal(y, torch.full_like(y, 3))
