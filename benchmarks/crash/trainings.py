"""Trainings that never were: what each kind writes, by whom, and what a calm evaluation of it finds."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select

from tests.services.driving import Driven, make_service
from tests.services.recording import NAN, PROJECT, Recording, Value, exploding_from, healthy, nan_from
from watchstep.format.documents import OnStop
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig, StopAction, WebhookAction
from watchstep_services.db.engine import open_database
from watchstep_services.db.models import (
    AlertRow,
    FindingRow,
    RuleConfigRow,
    RuleStateRow,
    Segment,
    WatermarkRow,
)
from watchstep_services.db.schema import upgrade

Told = Literal["announced", "some", "never"]
STEPS = 6
"""Of a segment."""


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        name: of the kind.
        value: what its tensors hold.
        segments: how many each worker writes.
        workers: how many there are.
        bad_step: the first that is bad: it must be stopped; -1 for none.
        on_stop: what a cooperative stop meets.
        job: what is bound to it: a process of this machine, a job that the harness counts, or nothing.
        stubborn: its job ends by a kill only.
        told: whether its segments are announced.
        crashes_first: an attempt without a bad step fails first.
    """

    name: str
    value: Value = healthy
    segments: int = 4
    workers: int = 1
    bad_step: int = -1
    on_stop: OnStop = "ignore"
    job: Literal["process", "counted", "none"] = "counted"
    stubborn: bool = False
    told: Told = "some"
    crashes_first: bool = False

    @property
    def bad(self) -> bool:
        """Whether it must be stopped."""
        return self.bad_step >= 0


def _one_nan(step: int, name: str) -> float:
    return NAN if step == 20 and name == "loss" else 1.0


KINDS = (
    Kind("healthy", told="announced"),
    Kind("found", told="never", job="none"),
    Kind("two", workers=2),
    Kind("exploding", exploding_from(9), workers=2),
    Kind("bad", nan_from(20), bad_step=20, told="announced"),
    Kind("late", nan_from(21), bad_step=21, told="never"),
    Kind("once", _one_nan, bad_step=20),
    Kind("both", nan_from(19), workers=2, bad_step=19, stubborn=True),
    Kind("process", nan_from(22), bad_step=22, job="process"),
    Kind("stubborn", nan_from(18), bad_step=18, stubborn=True),
    Kind("asked", nan_from(13), bad_step=13, on_stop="raise", segments=30),
    Kind("alone", nan_from(8), bad_step=8, on_stop="raise", segments=30, job="none", told="never"),
    Kind("again", nan_from(20), bad_step=20, crashes_first=True),
)


def rules(receiver: str) -> tuple[RuleConfig, ...]:
    """The owner's: two that stop, of which each attempt gets one stop, and one that only tells."""
    tell = WebhookAction(url=receiver)
    return (
        RuleConfig(rule="non_finite_values", severity="critical", actions=(StopAction(), tell)),
        RuleConfig(rule="non_finite_values", name="again", actions=(StopAction(),)),
        RuleConfig(rule="exploding_gradient", actions=(tell,), **{"for": MinimumDuration(steps=3)}),
    )


@dataclass(frozen=True)
class Found:
    """What rules found of one attempt: alerts by rule config, and all findings; which worker's rows came first is no part of it."""

    alerts: dict[str, tuple[str, int, str]]
    findings: tuple[str, ...]

    def difference(self, expected: Found) -> str:
        """How this differs from what was expected, in words."""
        lacks, more = set(expected.findings) - set(self.findings), set(self.findings) - set(expected.findings)
        alerts = "" if self.alerts == expected.alerts else f"alerts {self.alerts}, not {expected.alerts}; "
        counts = f"{len(self.findings)} findings, not {len(expected.findings)}"
        return f"{alerts}{counts}; lacks {sorted(lacks)[:20]}, has beyond them {sorted(more)[:20]}"


@dataclass
class Calm:
    """What is found where nothing is ever killed: each attempt is evaluated once, at its end, in this process."""

    rules: tuple[RuleConfig, ...]

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, bool, tuple[int, ...]], Found] = {}

    def found(self, kind: Kind, written: tuple[int, ...], *, first_try: bool = False) -> Found:
        """What is found when each worker has written so many segments."""
        key = (kind.name, first_try, written)
        if key not in self._known:
            self._known[key] = self._evaluate(kind, written, healthy if first_try else kind.value)
        return self._known[key]

    def _evaluate(self, kind: Kind, written: tuple[int, ...], value: Value) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            store = Store.open(Path(folder) / "store", create=True)
            recording = Recording(store).begin(world_size=kind.workers, on_stop=kind.on_stop)
            keys = [
                recording.write(seq, seq * STEPS, (seq + 1) * STEPS - 1, value, worker)
                for worker, count in enumerate(written)
                for seq in range(count)
            ]
            database = open_database(f"sqlite:///{Path(folder) / 'calm.sqlite'}")
            try:
                upgrade(database)
                driven = Driven(make_service(database, store, self.rules))
                run_id = driven.register()
                driven.announce(run_id, *keys)
                driven.settle(run_id)
                return found_of(driven.service.database, run_id, recording.attempt)
            finally:
                database.close()


def found_of(database: Any, run_id: int, attempt: str) -> Found:
    """What the database says that rules found of an attempt."""
    with database.read() as session:
        alerts = session.execute(select(AlertRow).filter_by(run_id=run_id, attempt=attempt)).scalars().all()
        names = {row.config_id: row.name for row in alerts}
        rows = session.execute(
            select(FindingRow).where(FindingRow.config_id.in_(names), FindingRow.attempt == attempt)
        ).scalars()
        findings = sorted((names[row.config_id], _plain(row.finding)) for row in rows)
    return Found(
        {row.name: (row.phase, row.since_step, _plain(row.finding)) for row in alerts},
        tuple(f"{name}: {finding}" for name, finding in findings),
    )


def progress_of(database: Any, run_id: int, attempt: str) -> str:
    """What the database says of how an attempt was read and judged, to explain a difference."""
    with database.read() as session:
        segments = session.execute(select(Segment).filter_by(run_id=run_id, attempt=attempt)).scalars().all()
        watermarks = session.execute(select(WatermarkRow).filter_by(run_id=run_id, attempt=attempt)).scalars()
        states = session.execute(
            select(RuleStateRow)
            .join(RuleConfigRow, RuleConfigRow.id == RuleStateRow.config_id)
            .where(RuleConfigRow.run_id == run_id, RuleStateRow.attempt == attempt)
        ).scalars()
        read = sorted((row.writer, row.seq, row.state, row.position) for row in segments)
        passed = [(row.tick, row.step, row.cause) for row in watermarks]
        health = [(row.config_id, row.findings, row.reported_health) for row in states]
    return f"segments {read}, watermarks {passed}, rules {health}"


def _plain(finding: dict[str, Any] | None) -> str:
    return repr(sorted((finding or {}).items(), key=lambda item: item[0]))


@functools.lru_cache(maxsize=4096)
def encoded(kind: Kind, seq: int, worker: int, *, first_try: bool) -> bytes:
    """The bytes of one segment; made once, whatever number of runs write them."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Store.open(folder))
        value = healthy if first_try else kind.value
        return recording.encoded(seq * STEPS, (seq + 1) * STEPS - 1, value, worker)


def in_turn(number: int) -> Iterator[tuple[str, Kind]]:
    """Names and kinds of the runs of one round."""
    for kind in KINDS:
        yield f"r{number}-{kind.name}", kind


__all__ = ["KINDS", "PROJECT", "STEPS", "Calm", "Found", "Kind", "encoded", "found_of", "in_turn", "rules"]
