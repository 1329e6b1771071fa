"""Projects with their backends and rules; tokens; requests with idempotency keys."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String, Text, and_, select
from sqlalchemy.orm import Mapped, column_property, mapped_column, relationship

from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.encrypted_addresses import AddressJson, EncryptedText
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId
from watchstep_services.db.models.runs import RunRow
from watchstep_services.db.models.stores import ProjectStore


class Project(Base):
    """A project. An archived one accepts no new runs, and can still be read.

    ``deferred_until_ns``: until then its runs are evaluated as if they had become due later, by the time that is left, because its
    evaluations took much time (`service.rule_time`). ``turn_run_id`` and ``turn_epoch``: the run whose large evaluation is in progress, and
    the epoch of its claim; the turn ends with the claim (`runs.large_turns`).
    """

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    description: Mapped[str] = mapped_column(Text, default="", server_default="")
    created_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    archived_ns: Mapped[int | None] = mapped_column(default=None)
    deferred_until_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    turn_run_id: Mapped[int] = mapped_column(default=0, server_default="0")
    turn_epoch: Mapped[int] = mapped_column(default=0, server_default="0")
    placed: Mapped[ProjectStore] = relationship(
        lazy="joined",
        primaryjoin=lambda: and_(ProjectStore.project == Project.name, ProjectStore.is_current),
    )

    @property
    def place(self) -> StorePlace:
        """The location of its new runs. That of a run is `RunRow.place`."""
        return self.placed.place


class ProjectCapture(Base):
    """The capture document of a project: what its runs record unless the program or its launch sets it."""

    __tablename__ = "project_captures"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    document: Mapped[dict[str, Any]]
    changed_ns: Mapped[int]
    changed_by: Mapped[str] = mapped_column(String(256), default="")


class BackendRow(Base):
    """A registered backend, on which jobs can be stopped."""

    __tablename__ = "backends"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    name: Mapped[str] = mapped_column(String(32), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    version: Mapped[int] = mapped_column(default=1)
    created_ns: Mapped[int]
    updated_ns: Mapped[int]


class ProjectBackend(Base):
    """A backend that a project may use."""

    __tablename__ = "project_backends"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    backend_id: Mapped[int] = mapped_column(ForeignKey("backends.id"), primary_key=True, index=True)


class JobOwner(Base):
    """The project that owns a job since it was first bound; other projects cannot bind or stop it.

    ``job`` is a digest of the job's identity, independent of its backend's name.
    """

    __tablename__ = "job_owners"

    job: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))


_OVER = ("completed", "failed", "stopped")


class Token(Base):
    """A bearer token's hash; the token itself is not stored. Its id is public.

    ``run_id``: its only run, with which it is deleted; None for all runs of its ``project``, or of all projects. ``maker``: the id of the
    token that created it, empty for none; only for tokens of single runs.
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
    """The name of its only run; None if it has none."""

    run_over_ns: Mapped[int | None] = column_property(
        select(RunRow.ended_ns).where(RunRow.id == run_id, RunRow.state.in_(_OVER)).scalar_subquery()
    )
    """When its only run ended; None while it may continue, as a lost run may."""


class ApiRequest(Base):
    """A request with an Idempotency-Key and its answer; ``status`` is null while it is in progress.

    ``name`` is a hash of the token and the key, ``request`` a hash of the request.
    """

    __tablename__ = "api_requests"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None] = mapped_column(default=None)
    body: Mapped[str] = mapped_column(EncryptedText, default="")
    claimed_ns: Mapped[int]
    expires_ns: Mapped[int] = mapped_column(index=True)


class ProjectRule(Base):
    """A rule config of a project, which is evaluated on every run that is registered later."""

    __tablename__ = "project_rules"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    data: Mapped[dict[str, Any]] = mapped_column(AddressJson)
    changed_ns: Mapped[int]
