"""Samples of the batches that PyTorch's data loaders yield to a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from watchstep.pytorch.loaders import loader_batches

if TYPE_CHECKING:
    from watchstep.capture.steps.session import Session

_MAX_EARLY = 32


class LoaderSamples:
    """Passes the samples of data loaders to a recording. Batches that are received without gradients are no training."""

    def __init__(self, session: Session) -> None:
        """Start to listen."""
        self._session = session
        loader_batches.listen(self)

    def batch_yielded(
        self,
        loader: DataLoader[Any] | None,
        batch: Any,  # noqa: ARG002 - the listener's signature
        sample_ids: Sequence[Any] | None,
        epoch: int,
        number: int,
    ) -> None:
        """See `BatchListener`."""
        if torch.is_grad_enabled() and self._session.mode == "train":
            self._session.samples.yielded(loader, sample_ids, epoch, number)

    def failed(self, error: Exception) -> None:
        """Count a fault."""
        self._session.health.fault("samples", error)

    def detach(self) -> None:
        """Stop listening."""
        loader_batches.forget(self)


class EarlySamples:
    """Collects the samples of the batches before a recording begins, at the first step of an optimizer."""

    def __init__(self) -> None:
        """Start to listen."""
        self._batches: list[tuple[DataLoader[Any] | None, Sequence[Any] | None, int, int]] = []
        loader_batches.listen(self)

    def batch_yielded(
        self,
        loader: DataLoader[Any] | None,
        batch: Any,  # noqa: ARG002 - as above
        sample_ids: Sequence[Any] | None,
        epoch: int,
        number: int,
    ) -> None:
        """See `BatchListener`."""
        if torch.is_grad_enabled():
            self._batches = [*self._batches[-_MAX_EARLY + 1 :], (loader, sample_ids, epoch, number)]

    def failed(self, error: Exception) -> None:
        """Do nothing: there is no recording to count it."""

    def pass_to(self, session: Session) -> None:
        """Stop listening, and pass the batches on. They belong to the step that ends next."""
        loader_batches.forget(self)
        batches, self._batches = self._batches, []
        for loader, sample_ids, epoch, number in batches:
            session.samples.yielded(loader, sample_ids, epoch, number)
