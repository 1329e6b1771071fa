"""Receivers of projects, their encrypted secrets, and routing trees.

A project can have them before its first run, so they do not refer to its row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKeyConstraint, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base
from watchstep_services.db.sealed_addresses import AddressJson


class ReceiverRow(Base):
    """A receiver as data; a secret in it is a reference, or says that it is kept."""

    __tablename__ = "receivers"

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    config: Mapped[dict[str, Any]] = mapped_column(AddressJson)
    written_ns: Mapped[int]
    written_by: Mapped[str] = mapped_column(String(256))


class ReceiverSecret(Base):
    """A secret of a receiver, encrypted with the service's key."""

    __tablename__ = "receiver_secrets"
    __table_args__ = (
        ForeignKeyConstraint(
            ["project", "name"], ["receivers.project", "receivers.name"], ondelete="CASCADE"
        ),
    )

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    field: Mapped[str] = mapped_column(String(64), primary_key=True)
    encrypted: Mapped[str] = mapped_column(Text)


class RoutingTree(Base):
    """A project's own tree; without one, the owner's file's is used."""

    __tablename__ = "routing_trees"

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    tree: Mapped[dict[str, Any]]
    written_ns: Mapped[int]
    written_by: Mapped[str] = mapped_column(String(256))
