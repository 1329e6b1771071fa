"""How long what of a project's runs is kept, and what was done to each run for it."""

from __future__ import annotations

from sqlalchemy import Boolean, ForeignKey, String, Text, false
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base


class RetentionPolicy(Base):
    """How long a project keeps what, in seconds after a run's end; None: for ever, or as the settings say."""

    __tablename__ = "retention_policies"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    compact_after_s: Mapped[int | None] = mapped_column(default=None)
    originals_s: Mapped[int | None] = mapped_column(default=None)
    keep_tensors_s: Mapped[int | None] = mapped_column(default=None)
    keep_runs_s: Mapped[int | None] = mapped_column(default=None)
    changed_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    changed_ns: Mapped[int]


class Upkeep(Base):
    """What was done to a run after its end, and by when it is to be looked at again.

    ``ended_ns`` is the end that the times belong to: after another attempt's end all is due anew. A run that is ``on_hold``
    loses nothing, whatever the policy says.
    """

    __tablename__ = "upkeep"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    ended_ns: Mapped[int] = mapped_column(default=0)
    next_ns: Mapped[int] = mapped_column(default=0, index=True)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    summarized_ns: Mapped[int | None] = mapped_column(default=None)
    compacted_ns: Mapped[int | None] = mapped_column(default=None)
    originals_gone_ns: Mapped[int | None] = mapped_column(default=None)
    tensors_gone_ns: Mapped[int | None] = mapped_column(default=None)
    deleting: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    on_hold: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    hold_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    hold_reason: Mapped[str] = mapped_column(Text, default="")
    tries: Mapped[int] = mapped_column(default=0)
    problem: Mapped[str] = mapped_column(Text, default="")
