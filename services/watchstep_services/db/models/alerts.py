"""Alerts over attempts, silences, groups and suppressed notifications; receivers, their encrypted secrets, and routing trees."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, ForeignKey, ForeignKeyConstraint, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.encrypted_addresses import AddressJson
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId

FINGERPRINT_LENGTH = 32
INCIDENT_LENGTH = 16
WHO_LENGTH = 256


class AlertInstanceRow(Base):
    """The state of an alert over all attempts of a run: one row for each fingerprint that has fired.

    ``config_id`` and ``attempt`` are those that made it fire last; ``episode`` counts how often it began to fire. ``was_right``: the
    answer of a person, ``yes``, ``no`` or ``not_sure``; empty without one.
    """

    __tablename__ = "alert_instances"
    __table_args__ = (UniqueConstraint("run_id", "fingerprint"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    fingerprint: Mapped[str] = mapped_column(String(FINGERPRINT_LENGTH), index=True)
    config_id: Mapped[int]
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    severity: Mapped[str] = mapped_column(String(16))
    labels: Mapped[dict[str, Any]]
    receivers: Mapped[list[str]] = mapped_column(JSON)
    phase: Mapped[str] = mapped_column(String(16))
    episode: Mapped[int] = mapped_column(default=1)
    dry_run: Mapped[bool] = mapped_column(Boolean, default=False)
    inhibited_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    step: Mapped[int]
    since_ns: Mapped[int]
    fired_ns: Mapped[int]
    resolved_ns: Mapped[int | None] = mapped_column(default=None)
    event_id: Mapped[str] = mapped_column(String(36))
    message: Mapped[str] = mapped_column(Text)
    explanation: Mapped[dict[str, Any]]
    finding: Mapped[dict[str, Any]]
    incident: Mapped[str] = mapped_column(String(INCIDENT_LENGTH), default="", server_default="")
    acknowledged_by: Mapped[str] = mapped_column(String(WHO_LENGTH), default="")
    acknowledged_ns: Mapped[int | None] = mapped_column(default=None)
    acknowledgement: Mapped[str] = mapped_column(Text, default="")
    was_right: Mapped[str] = mapped_column(String(8), default="", server_default="")

    @property
    def is_hidden(self) -> bool:
        """Whether it is not notified: a dry run, an inhibited alert, or severity info."""
        return self.dry_run or bool(self.inhibited_by) or self.severity == "info"


class Incident(Base):
    """Alerts of an attempt that begin close together: their ``onsets`` and the summary computed from them."""

    __tablename__ = "incidents"
    __table_args__ = (UniqueConstraint("run_id", "key"), Index("incidents_by_step", "run_id", "last_step"))

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    key: Mapped[str] = mapped_column(String(INCIDENT_LENGTH))
    first_step: Mapped[int]
    last_step: Mapped[int]
    onsets: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    summary: Mapped[dict[str, Any]]


class Silence(Base):
    """Suppresses notifications of alerts that match all ``matchers`` from ``starts_ns`` until ``ends_ns``."""

    __tablename__ = "silences"
    __table_args__ = (Index("silences_by_end", "project", "ends_ns"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    matchers: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    author: Mapped[str] = mapped_column(String(WHO_LENGTH))
    reason: Mapped[str] = mapped_column(Text)
    suppresses_stop: Mapped[bool] = mapped_column(Boolean, default=False)
    created_ns: Mapped[int]
    starts_ns: Mapped[int]
    ends_ns: Mapped[int]
    expired_by: Mapped[str] = mapped_column(String(WHO_LENGTH), default="")


class AlertGroup(Base):
    """Alerts that one receiver is notified of together, and when the group is flushed next; ``generation`` counts notifications.

    ``open``: notified since the group last had nothing to report. ``refresh``: its receiver resolves alerts that are not sent
    again. ``run_id`` is null if it spans runs.
    """

    __tablename__ = "alert_groups"
    # Numbers are never reused, because ids of notifications contain them.
    __table_args__ = (UniqueConstraint("project", "key"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    key: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[int | None] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), default=None, index=True
    )
    receiver: Mapped[str] = mapped_column(String(NAME_LENGTH))
    labels: Mapped[dict[str, Any]]
    wait_ns: Mapped[int]
    interval_ns: Mapped[int]
    repeat_ns: Mapped[int]
    send_resolved: Mapped[bool] = mapped_column(Boolean)
    refresh: Mapped[bool] = mapped_column(Boolean, default=False)
    open: Mapped[bool] = mapped_column(Boolean, default=False)
    generation: Mapped[int] = mapped_column(default=0)
    repeats: Mapped[int] = mapped_column(default=0)
    notified_ns: Mapped[int] = mapped_column(default=0)
    due_ns: Mapped[int | None] = mapped_column(default=None, index=True)


class GroupMember(Base):
    """An alert in a group, and the last notification of it."""

    __tablename__ = "alert_group_members"

    group_id: Mapped[int] = mapped_column(ForeignKey("alert_groups.id", ondelete="CASCADE"), primary_key=True)
    instance_id: Mapped[int] = mapped_column(
        ForeignKey("alert_instances.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    notified_episode: Mapped[int] = mapped_column(default=0)
    notified_phase: Mapped[str] = mapped_column(String(16), default="")


class Muted(Base):
    """A suppressed notification of an alert and the reason; once for each time that the alert began to fire.

    ``receiver`` is empty if no receiver is notified, and ``webhook`` for the addresses in the rule config.
    """

    __tablename__ = "muted_notifications"
    __table_args__ = (UniqueConstraint("instance_id", "episode", "receiver", "reason", "detail"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    instance_id: Mapped[int] = mapped_column(ForeignKey("alert_instances.id", ondelete="CASCADE"))
    episode: Mapped[int]
    receiver: Mapped[str] = mapped_column(String(NAME_LENGTH))
    reason: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(String(WHO_LENGTH))
    at_ns: Mapped[int]


class ReceiverRow(Base):
    """A receiver as data; secrets in it are references, or marked as stored."""

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
    """A project's routing tree; without one, the tree of the owner's file is used."""

    __tablename__ = "routing_trees"

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    tree: Mapped[dict[str, Any]]
    written_ns: Mapped[int]
    written_by: Mapped[str] = mapped_column(String(256))
