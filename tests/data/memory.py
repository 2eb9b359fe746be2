"""An in-memory source of trajectories."""

from dataclasses import dataclass

import numpy as np

from sigmasolver.data.header import Header


@dataclass
class Memory:
    """The minimal source: trajectories by index."""

    header: Header
    data: np.ndarray

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.data[index]
