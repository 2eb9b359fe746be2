"""Memory that a computation saves for its backward pass."""

import torch


def saved_bytes(call, without):
    """Bytes of the storages that autograd saves while `call` runs, each once, except those of the tensors `without`."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in without}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in saved.values())
