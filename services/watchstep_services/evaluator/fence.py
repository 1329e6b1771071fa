"""The fence: whatever an evaluation writes, it writes while the run is its own, or not at all."""

from __future__ import annotations

from sqlalchemy.orm import Session

from watchstep_services.database.models import Run
from watchstep_services.evaluator.claim import Claim


class FencedError(Exception):
    """Another worker has taken the run: whatever was found out is discarded."""


def lock_run(session: Session, run_id: int, held: Claim | None) -> Run:
    """Lock a run's row until the transaction ends, so that nobody takes the run meanwhile.

    Args:
        session: the transaction.
        run_id: of the run.
        held: the claim in whose name is written; None for work that needs none.

    Raises:
        FencedError: another worker has taken the run.
    """
    run = session.get_one(Run, run_id, with_for_update=True)
    if held is not None and run.epoch != held.epoch:
        raise FencedError
    return run
