"""Projects, the stores that their runs lie on, and the backends that their jobs may run on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String, Text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class StoreRow(Base):
    """A store that an admin registered, and the role by which it is reached. Its version goes up with every change."""

    __tablename__ = "stores"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), unique=True)
    url: Mapped[str] = mapped_column(Text)
    role_arn: Mapped[str] = mapped_column(Text, default="")
    external_id: Mapped[str] = mapped_column(Text, default="")
    region: Mapped[str] = mapped_column(String(64), default="")
    endpoint: Mapped[str] = mapped_column(Text, default="")
    version: Mapped[int] = mapped_column(default=1)
    created_ns: Mapped[int]
    updated_ns: Mapped[int]

    @property
    def registration(self) -> StoreRegistration:
        """How it is reached."""
        return StoreRegistration(self.url, self.role_arn, self.external_id, self.region, self.endpoint)


class ProjectStore(Base):
    """The one store of a project, and the prefix below it."""

    __tablename__ = "project_stores"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), index=True)
    prefix: Mapped[str] = mapped_column(Text, default="")
    store: Mapped[StoreRow] = relationship(lazy="joined", innerjoin=True)


class Project(Base):
    """A project. One that is archived takes no new runs, and can still be read.

    ``deferred_until_ns``: until then its runs are evaluated as if they had become due later, by as much as is left: its SQL and
    Python rules took much time (`evaluator.rule_time`).
    """

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    listed_ns: Mapped[int] = mapped_column(default=0)
    description: Mapped[str] = mapped_column(Text, default="", server_default="")
    created_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    archived_ns: Mapped[int | None] = mapped_column(default=None)
    deferred_until_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    placed: Mapped[ProjectStore] = relationship(lazy="joined")

    @property
    def place(self) -> StorePlace:
        """Where its runs lie."""
        held = self.placed
        return StorePlace(held.store_id, held.store.version, held.store.registration, held.prefix, self.name)


class BackendRow(Base):
    """A backend that an admin registered: where jobs run that can be stopped."""

    __tablename__ = "backends"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    name: Mapped[str] = mapped_column(String(32), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    version: Mapped[int] = mapped_column(default=1)
    created_ns: Mapped[int]
    updated_ns: Mapped[int]


class ProjectBackend(Base):
    """A project whose jobs may run on a backend."""

    __tablename__ = "project_backends"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    backend_id: Mapped[int] = mapped_column(ForeignKey("backends.id"), primary_key=True, index=True)


class JobOwner(Base):
    """The project that a job belongs to, from the first time that it is bound: no other can bind it, or stop it.

    ``job`` is a digest of what the job is, on whatever backend it is registered.
    """

    __tablename__ = "job_owners"

    job: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
