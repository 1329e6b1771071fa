"""Rules that watch the clock: when a run is evaluated though nothing came, and when that means nothing any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from sqlalchemy import String, bindparam, select

from watchstep.errors import RuleError
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleMemory, due_ns
from watchstep_rules.registry import find_rule
from watchstep_services.db.models import Attempt, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.evaluation.baselines import pinned_baseline
from watchstep_services.runs.claim import Claim
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service
from watchstep_services.service.judging import Loaded, load_config, memory_of


class Remembered(Protocol):
    """A rule config and what it remembers."""

    @property
    def config(self) -> RuleConfig | None:
        """None where it cannot be read."""

    @property
    def memory(self) -> RuleMemory:
        """Of the attempt."""


def load_configs(service: Service, run_id: int, attempt: str, *, only_clocks: bool = False) -> list[Loaded]:
    """The rule configs of a run, with what they remember of an attempt; all, or those that watch the clock."""
    with service.database.read() as session:
        rows = session.execute(_CONFIGS, {"of_run": run_id, "named": attempt}).all()
        compares = not only_clocks and any(row[0].rule == UnlikeEarlierRuns.name for row in rows)
        baseline = pinned_baseline(session, run_id, attempt) if compares else None
    return [load_config(*row, baseline=baseline) for row in rows if not only_clocks or _watches(row[0].rule)]


def held_configs(service: Service, claim: Claim, attempt: str, *, anew: bool = False) -> list[Loaded]:
    """The same for a run that is claimed: from this process where it is what the database holds, unless ``anew`` is set."""
    cached = service.remembered.get((claim.run_id, attempt), claim.epoch)
    if cached is None or anew:
        return load_configs(service, claim.run_id, attempt)
    # Read anew from its text, as if it came from the database: one way in, whatever a rule left in its state.
    return [replace(loaded, memory=memory_of(loaded.state)) for loaded in cached]


# Made once: every evaluation asks it.
_CONFIGS = (
    select(RuleConfigRow, RuleStateRow.state, RuleStateRow.reported_health)
    .outerjoin(
        RuleStateRow,
        (RuleStateRow.config_id == RuleConfigRow.id)
        & (RuleStateRow.attempt == bindparam("named", type_=String())),
    )
    .where(RuleConfigRow.run_id == bindparam("of_run"), ~RuleConfigRow.origin.startswith("retired"))
    .order_by(RuleConfigRow.id)
)


def _watches(rule: str) -> bool:
    try:
        return find_rule(rule).clock
    except RuleError:
        return False  # of another version of Watchstep; its health says so when rows come


def next_tick(remembered: Iterable[Remembered]) -> int | None:
    """When the first of some rule configs wants a tick; None where all wait for rows."""
    moments = [due_ns(claim.config, claim.memory) for claim in remembered if claim.config is not None]
    return min((moment for moment in moments if moment is not None), default=None)


def is_over(service: Service, run_id: int, attempt: str) -> bool:
    """Whether silence of an attempt says nothing: it has ended, or a later one goes on.

    An attempt that has written nothing is over, too, once its run is held for lost: nobody knows that it ever began.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    if row is None or run.attempt != attempt or run.state in ENDED:
        return True
    never_wrote = not row.first_seen_ns
    return len(row.ends) >= max(1, row.world_size) or (never_wrote and run.state == "lost")


def newest_attempt(service: Service, run_id: int) -> str:
    """The run's newest attempt; empty where it has none, or that one is over."""
    with service.database.read() as session:
        attempt = session.get_one(RunRow, run_id).attempt
    return attempt if attempt and not is_over(service, run_id, attempt) else ""


def attempt_to_tick(service: Service, run_id: int, now_ns: int) -> str:
    """The attempt of which a rule wants a tick now; empty for none."""
    attempt = newest_attempt(service, run_id)
    if not attempt:
        return ""
    due = next_tick(load_configs(service, run_id, attempt, only_clocks=True))
    return attempt if due is not None and due <= now_ns else ""
