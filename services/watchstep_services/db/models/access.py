"""Who may do what."""

from __future__ import annotations

from sqlalchemy import ForeignKey, String, select
from sqlalchemy.orm import Mapped, column_property, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base
from watchstep_services.db.models.runs import RunRow

_OVER = ("completed", "failed", "stopped")


class Token(Base):
    """A bearer token, hashed; the token itself is nowhere kept. Its id is public.

    ``run_id``: the only run that it is for, and goes with; of its ``project`` or of all where that is None. ``maker``: the id of the
    token that made it, empty for none; of tokens of single runs only.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str | None] = mapped_column(String(NAME_LENGTH), default=None, index=True)
    run_id: Mapped[int | None] = mapped_column(
        ForeignKey("runs.id", name="fk_tokens_run_id_runs"), default=None, index=True
    )
    maker: Mapped[str] = mapped_column(String(16), default="", server_default="", index=True)
    created_ns: Mapped[int]
    created_by: Mapped[str] = mapped_column(String(256), default="")
    expires_ns: Mapped[int | None] = mapped_column(default=None)
    revoked_ns: Mapped[int | None] = mapped_column(default=None)
    revoked_by: Mapped[str] = mapped_column(String(256), default="")
    last_used_ns: Mapped[int | None] = mapped_column(default=None)

    run: Mapped[str | None] = column_property(select(RunRow.run).where(RunRow.id == run_id).scalar_subquery())
    """The name of its only run; None where it has none."""

    run_over_ns: Mapped[int | None] = column_property(
        select(RunRow.ended_ns).where(RunRow.id == run_id, RunRow.state.in_(_OVER)).scalar_subquery()
    )
    """When its only run ended; None while that may go on, as one may that is only lost."""
