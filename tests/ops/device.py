"""Device on which kernels are tested: a GPU if there is one, else the CPU with Triton's interpreter."""

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.gpu
