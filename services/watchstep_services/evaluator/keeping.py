"""Keep a claim while what it was taken for goes on: however long rules take, nobody else begins the same."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from watchstep_services.evaluator.claim import Claim, renew
from watchstep_services.service import Service
from watchstep_services.settings import nanoseconds

_MOST_RENEWALS = 120
"""Forty leases: what takes longer hangs, and another may try."""

_log = logging.getLogger(__name__)


@contextmanager
def kept(service: Service, held: Claim) -> Iterator[None]:
    """Renew a claim three times in each lease, from a thread, until the block ends.

    A claim that is another's by now is left to them; the block finds out at its commit.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_renew_until, args=(service, held, ended), name="watchstep-lease", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _renew_until(service: Service, held: Claim, ended: threading.Event) -> None:
    lease = service.settings.lease_seconds
    for _ in range(_MOST_RENEWALS):
        if ended.wait(lease / 3):
            return
        try:
            if not renew(service.database, held, nanoseconds(lease)):
                return
        except SQLAlchemyError as error:
            _log.warning("run %s/%s: its lease is not renewed: %s", held.project, held.run, error)
