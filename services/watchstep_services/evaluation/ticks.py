"""Rules that evaluate the clock: when an evaluation is due without new rows, and when silence is no longer evaluated."""

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


class ConfigWithState(Protocol):
    """A rule config and its rule state."""

    @property
    def config(self) -> RuleConfig | None:
        """The config; None if it cannot be read."""

    @property
    def memory(self) -> RuleMemory:
        """The state on the attempt."""


def load_configs(service: Service, run_id: int, attempt: str, *, only_clocks: bool = False) -> list[Loaded]:
    """Load a run's rule configs with their states on an attempt: all configs, or those that evaluate the clock."""
    with service.database.read() as session:
        rows = session.execute(_CONFIGS, {"of_run": run_id, "of_attempt": attempt}).all()
        compares = not only_clocks and any(row[0].rule == UnlikeEarlierRuns.name for row in rows)
        baseline = pinned_baseline(session, run_id, attempt) if compares else None
    return [load_config(*row, baseline=baseline) for row in rows if not only_clocks or _watches(row[0].rule)]


def cached_configs(service: Service, claim: Claim, attempt: str, *, reload: bool = False) -> list[Loaded]:
    """Return `load_configs` of a claimed run, from the rule-state cache if it is current and ``reload`` is not set."""
    cached = service.rule_states.get((claim.run_id, attempt), claim.epoch)
    if cached is None or reload:
        return load_configs(service, claim.run_id, attempt)
    # The state is parsed from its text as if it came from the database, so that both paths give the same state.
    return [replace(loaded, memory=memory_of(loaded.state)) for loaded in cached]


# Built once, because every evaluation executes it.
_CONFIGS = (
    select(RuleConfigRow, RuleStateRow.state, RuleStateRow.reported_health)
    .outerjoin(
        RuleStateRow,
        (RuleStateRow.config_id == RuleConfigRow.id)
        & (RuleStateRow.attempt == bindparam("of_attempt", type_=String())),
    )
    .where(RuleConfigRow.run_id == bindparam("of_run"), ~RuleConfigRow.origin.startswith("retired"))
    .order_by(RuleConfigRow.id)
)


def _watches(rule: str) -> bool:
    try:
        return find_rule(rule).clock
    except RuleError:
        return False  # a rule of another version of Watchstep; its health reports it when rows arrive


def next_tick(configs: Iterable[ConfigWithState]) -> int | None:
    """When the first of some rule configs is due for a tick; None if all wait for rows."""
    moments = [due_ns(entry.config, entry.memory) for entry in configs if entry.config is not None]
    return min((moment for moment in moments if moment is not None), default=None)


def is_over(service: Service, run_id: int, attempt: str) -> bool:
    """Whether an attempt's silence is not evaluated: it has ended, or a later attempt runs.

    An attempt that wrote nothing is also over once its run is lost: nothing shows that it began.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    if row is None or run.attempt != attempt or run.state in ENDED:
        return True
    never_wrote = not row.first_seen_ns
    return len(row.ends) >= max(1, row.world_size) or (never_wrote and run.state == "lost")


def newest_attempt(service: Service, run_id: int) -> str:
    """The run's newest attempt; empty if there is none or it is over."""
    with service.database.read() as session:
        attempt = session.get_one(RunRow, run_id).attempt
    return attempt if attempt and not is_over(service, run_id, attempt) else ""


def attempt_to_tick(service: Service, run_id: int, now_ns: int) -> str:
    """The newest attempt, if one of its rules is due for a tick; otherwise empty."""
    attempt = newest_attempt(service, run_id)
    if not attempt:
        return ""
    due = next_tick(load_configs(service, run_id, attempt, only_clocks=True))
    return attempt if due is not None and due <= now_ns else ""
