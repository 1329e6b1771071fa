"""Registered stores, and the locations of projects on them."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class StoreRow(Base):
    """A registered store, and the role by which it is accessed. Every change increments its version.

    ``is_own``: the service's owner started it on this store. Projects that their first run creates may use every own store.
    """

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
    is_own: Mapped[bool] = mapped_column(default=False, server_default=false())

    @property
    def registration(self) -> StoreRegistration:
        """How it is accessed."""
        return StoreRegistration(self.url, self.role_arn, self.external_id, self.region, self.endpoint)


class ProjectStore(Base):
    """A store of a project, and the prefix below it. A run is read from the one that it was registered with.

    ``is_current``: the one of new runs whose registration names no store. ``listed_ns``: when it was last listed for new runs.
    """

    __tablename__ = "project_stores"
    __table_args__ = (
        UniqueConstraint("project", "store_id", "prefix"),
        Index(
            "project_stores_current",
            "project",
            unique=True,
            sqlite_where=text("is_current"),
            postgresql_where=text("is_current"),
        ),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    store_id: Mapped[int] = mapped_column(ForeignKey("stores.id"), index=True)
    prefix: Mapped[str] = mapped_column(Text, default="")
    is_current: Mapped[bool] = mapped_column(default=True)
    listed_ns: Mapped[int] = mapped_column(default=0)
    store: Mapped[StoreRow] = relationship(lazy="joined", innerjoin=True)

    @property
    def place(self) -> StorePlace:
        """The location of the project's runs on it."""
        return StorePlace(
            self.store_id, self.store.version, self.store.registration, self.prefix, self.project
        )
