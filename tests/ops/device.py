"""Where kernels are tested: on a GPU for real, elsewhere through Triton's interpreter."""

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.gpu
