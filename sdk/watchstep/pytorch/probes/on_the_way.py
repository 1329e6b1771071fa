"""A small tensor of figures that may still be on its way from a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.statistics import Floats


class OnTheWay:
    """Copies to the host without waiting; `numbers` waits, off the training thread."""

    def __init__(self, figures: Tensor) -> None:
        self._event: Any = None
        self._held = figures.detach().to("cpu", non_blocking=True)
        if figures.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether `numbers` would not wait."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> Floats:
        """The figures as float64, of the tensor's shape."""
        if self._event is not None:
            self._event.synchronize()
        return np.asarray(self._held.double().numpy())
