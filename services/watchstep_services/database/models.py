"""The tables. All times are nanoseconds since the epoch by the database's clock, unless a name says otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME_LENGTH = 128
_Id = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[int]: JSON,
        int: BigInteger,
        str: String,
    }


class Project(Base):
    """A project and the store that its runs lie on."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    store_url: Mapped[str] = mapped_column(Text)
    listed_ns: Mapped[int] = mapped_column(default=0)


class Run(Base):
    """A run: where it stands, and the fence around its evaluation."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("project", "run"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    run: Mapped[str] = mapped_column(String(NAME_LENGTH))
    state: Mapped[str] = mapped_column(String(16), default="created", index=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    epoch: Mapped[int] = mapped_column(default=0)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    cursor: Mapped[str] = mapped_column(Text, default="{}")
    journal: Mapped[int] = mapped_column(default=0)
    ticks: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int] = mapped_column(default=-1)
    control: Mapped[dict[str, Any]]
    health: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_ns: Mapped[int]
    ended_ns: Mapped[int | None] = mapped_column(default=None)
    heard_ns: Mapped[int]
    listed_ns: Mapped[int] = mapped_column(default=0)
    due_ns: Mapped[int | None] = mapped_column(default=None, index=True)
    hints: Mapped[int] = mapped_column(default=0)


class Attempt(Base):
    """An attempt: its workers, how far each came, what is sealed, and which segments hold the history.

    Its evaluations are the run's ticks before ``ticks``; those before ``journaled`` are on the store, in so many parts. Where
    the store refused one, the next is tried no sooner than ``journal_due_ns``.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "attempt"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    world_size: Mapped[int] = mapped_column(default=0)
    on_stop: Mapped[str] = mapped_column(String(16), default="ignore")
    started_ns: Mapped[int] = mapped_column(default=0)
    first_heard_ns: Mapped[int] = mapped_column(default=0)
    sealed: Mapped[int] = mapped_column(default=-1)
    largest: Mapped[int] = mapped_column(default=-1)
    writers: Mapped[dict[str, Any]] = mapped_column(default=dict)
    ends: Mapped[dict[str, Any]] = mapped_column(default=dict)
    context: Mapped[list[int]] = mapped_column(default=list)
    ticks: Mapped[int] = mapped_column(default=0, server_default="0")
    journaled: Mapped[int] = mapped_column(default=0, server_default="0")
    journal_parts: Mapped[int] = mapped_column(default=0, server_default="0")
    journal_due_ns: Mapped[int] = mapped_column(default=0, server_default="0")


class RuleConfigRow(Base):
    """A rule config of a run, as data, and whether it may stop the job."""

    __tablename__ = "rule_configs"
    __table_args__ = (UniqueConstraint("run_id", "origin", "name"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    origin: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    data: Mapped[dict[str, Any]]
    granted_stop: Mapped[bool] = mapped_column(Boolean)


class Memory(Base):
    """What a rule config remembers of one attempt: a `RuleMemory` as JSON text."""

    __tablename__ = "rule_memories"

    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"), primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    memory: Mapped[str] = mapped_column(Text)
    findings: Mapped[int] = mapped_column(default=0)


class Segment(Base):
    """The inbox: what was announced or found on the store, and, once read, its place in the journal.

    ``ranks`` says of each rank with rows in it: rank, first step, last step, rows.
    """

    __tablename__ = "segments"
    __table_args__ = (
        UniqueConstraint("run_id", "attempt", "node", "writer", "seq"),
        Index("segments_by_state", "run_id", "state"),
        Index("segments_by_position", "run_id", "position"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    node: Mapped[str] = mapped_column(String(NAME_LENGTH))
    writer: Mapped[str] = mapped_column(String(NAME_LENGTH))
    seq: Mapped[int]
    first: Mapped[int]
    last: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    found_ns: Mapped[int]
    position: Mapped[int | None] = mapped_column(default=None)
    ranks: Mapped[list[list[int]] | None] = mapped_column(JSON(none_as_null=True), default=None)
    problem: Mapped[str] = mapped_column(Text, default="")


class Tick(Base):
    """One evaluation that judged: the journal's end after it, and the clock that its rules were given.

    ``ended``: no row came, and the attempt had ended, so that silence was not judged.
    """

    __tablename__ = "ticks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    position: Mapped[int]
    at_ns: Mapped[int]
    ended: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())


class Seal(Base):
    """All steps up to this one are sealed since this tick."""

    __tablename__ = "seals"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    cause: Mapped[str] = mapped_column(String(16))
    at_ns: Mapped[int]


class Alert(Base):
    """Where the alert of a rule config stands on one attempt; its finding, and what is said of it to people."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("config_id", "attempt"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    severity: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(16))
    finding: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    details: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    since_step: Mapped[int]
    since_ns: Mapped[int]
    fired_ns: Mapped[int | None] = mapped_column(default=None)
    resolved_ns: Mapped[int | None] = mapped_column(default=None)


class FindingRow(Base):
    """A finding; only the first of a rule config are kept, the rest are counted."""

    __tablename__ = "findings"
    __table_args__ = (Index("findings_by_config", "config_id", "attempt"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    finding: Mapped[dict[str, Any]]


class Event(Base):
    """A CloudEvent that was published, in order."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(_Id, primary_key=True)
    id: Mapped[str] = mapped_column(String(36), unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    type: Mapped[str] = mapped_column(String(64))
    event: Mapped[dict[str, Any]]
    created_ns: Mapped[int]


class Action(Base):
    """The outbox: what an event causes. The key makes it happen once."""

    __tablename__ = "actions"
    __table_args__ = (Index("actions_by_due", "state", "next_ns"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    key: Mapped[str] = mapped_column(String(700), unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    event_id: Mapped[str] = mapped_column(String(36))
    kind: Mapped[str] = mapped_column(String(16))
    payload: Mapped[dict[str, Any]]
    stage: Mapped[int] = mapped_column(default=0)
    stage_since_ns: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(String(16), default="pending")
    claims: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    next_ns: Mapped[int] = mapped_column(default=0)
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None] = mapped_column(default=None)
    outcome: Mapped[str] = mapped_column(Text, default="")


class ActionTry(Base):
    """One try of an action, and what came of it."""

    __tablename__ = "action_tries"

    action_id: Mapped[int] = mapped_column(ForeignKey("actions.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at_ns: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(Text)


class Job(Base):
    """The job of one attempt, bound at launch or by an operator."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("run_id", "attempt"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    backend: Mapped[str] = mapped_column(String(32))
    job_id: Mapped[str] = mapped_column(String(256))
    identity: Mapped[dict[str, Any]]
    bound_by: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16), default="running")
    exit_code: Mapped[int | None] = mapped_column(default=None)
    gone_ns: Mapped[int | None] = mapped_column(default=None)


class Backtest(Base):
    """A backtest that somebody asked for: which runs of a project, by which rules, and how far it came.

    Runs are judged one by one: ``next`` is the place of the one that is due, ``tries`` how often it was begun.
    """

    __tablename__ = "backtests"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    runs: Mapped[list[str]] = mapped_column(JSON)
    rules: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    sweeps: Mapped[list[str]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16), default="waiting", index=True)
    next: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None] = mapped_column(default=None)


class BacktestResult(Base):
    """What a backtest found of one run."""

    __tablename__ = "backtest_results"

    backtest_id: Mapped[int] = mapped_column(ForeignKey("backtests.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    result: Mapped[dict[str, Any]]


class Token(Base):
    """A bearer token, hashed; the token itself is nowhere kept."""

    __tablename__ = "tokens"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str | None] = mapped_column(String(NAME_LENGTH), default=None)
    created_ns: Mapped[int]
