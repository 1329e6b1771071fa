"""Beginning to sample the system that a recording runs on."""

from __future__ import annotations

from watchstep.capture.identity import Identity
from watchstep.capture.session import Session
from watchstep.capture.system.sampler import Sampler


def start_sampling(session: Session, identity: Identity) -> Sampler | None:
    """A sampler that has begun, whose time counts against the recording's budget; None where none is wanted."""
    settings, alongside = session.config.sampling, session.system
    if settings is None or alongside is None:
        return None
    budget = session.schedule.budget
    cost = budget.written if budget is not None else None
    sampler = Sampler(settings, alongside, identity, session.health, cost)
    sampler.start()
    return sampler
