"""What a computation keeps for its backward pass."""

import torch


def saved_bytes(call, without):
    """Bytes of the storages that autograd keeps while `call` runs, each once, but for those of some tensors."""
    own = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in kept.values())
