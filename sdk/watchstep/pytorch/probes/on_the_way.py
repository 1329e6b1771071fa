"""A small tensor of figures that may still be on its way from a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.statistics import Floats


def stacked(figures: Sequence[Tensor]) -> Tensor:
    """Stack figures of one shape that may be on several devices, as the layers of a model may be.

    The result is on the first of their devices that is not the host: a copy to the host that is not waited for has no values yet.
    """
    device = next((figure.device for figure in figures if figure.device.type != "cpu"), figures[0].device)
    return torch.stack([figure.to(device, non_blocking=True) for figure in figures])


class OnTheWay:
    """Copies to the host without waiting; `numbers` waits, off the training thread."""

    def __init__(self, figures: Tensor) -> None:
        self._event: Any = None
        self._held = figures.detach().to("cpu", non_blocking=True)
        if figures.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(figures.device))

    @property
    def is_here(self) -> bool:
        """Whether `numbers` would not wait."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> Floats:
        """The figures as float64, of the tensor's shape."""
        if self._event is not None:
            self._event.synchronize()
        return np.asarray(self._held.double().numpy())
