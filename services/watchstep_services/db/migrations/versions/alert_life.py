"""Alerts over attempts, silences, groups of notifications, and the append-only audit log of stops."""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.add_column(sa.Column("fingerprint", sa.String(length=32), nullable=False, server_default=""))
    with op.batch_alter_table("rule_memories", schema=None) as batch_op:
        batch_op.add_column(sa.Column("told_health", sa.String(length=16), nullable=False, server_default=""))
    _standings()
    _silences()
    _groups()
    _stops()
    _fill_fingerprints()
    _only_grows()


def downgrade() -> None:
    for name in ("stop_audit", "stop_grants", "muted_notifications", "alert_group_members"):
        op.drop_table(name)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION watchstep_only_grows()")
    for name in ("alert_groups", "silences", "alert_standings"):
        op.drop_table(name)
    with op.batch_alter_table("rule_memories", schema=None) as batch_op:
        batch_op.drop_column("told_health")
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.drop_column("fingerprint")


def _standings() -> None:
    op.create_table(
        "alert_standings",
        sa.Column("id", _ID, nullable=False),
        sa.Column("run_id", _ID, nullable=False),
        sa.Column("fingerprint", sa.String(length=32), nullable=False),
        sa.Column("config_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("rule", sa.String(length=128), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("receivers", sa.JSON(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("episode", sa.BigInteger(), nullable=False),
        sa.Column("dry_run", sa.Boolean(), nullable=False),
        sa.Column("inhibited_by", sa.String(length=128), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("since_ns", sa.BigInteger(), nullable=False),
        sa.Column("fired_ns", sa.BigInteger(), nullable=False),
        sa.Column("resolved_ns", sa.BigInteger(), nullable=True),
        sa.Column("event_id", sa.String(length=36), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("explanation", sa.JSON(), nullable=False),
        sa.Column("finding", sa.JSON(), nullable=False),
        sa.Column("acknowledged_by", sa.String(length=256), nullable=False),
        sa.Column("acknowledged_ns", sa.BigInteger(), nullable=True),
        sa.Column("acknowledgement", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "fingerprint"),
    )
    op.create_index("ix_alert_standings_fingerprint", "alert_standings", ["fingerprint"])


def _silences() -> None:
    op.create_table(
        "silences",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.Column("author", sa.String(length=256), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("holds_stop", sa.Boolean(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("starts_ns", sa.BigInteger(), nullable=False),
        sa.Column("ends_ns", sa.BigInteger(), nullable=False),
        sa.Column("expired_by", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("silences_by_end", "silences", ["project", "ends_ns"])


def _groups() -> None:
    op.create_table(
        "alert_groups",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("run_id", _ID, nullable=True),
        sa.Column("receiver", sa.String(length=128), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("wait_ns", sa.BigInteger(), nullable=False),
        sa.Column("interval_ns", sa.BigInteger(), nullable=False),
        sa.Column("repeat_ns", sa.BigInteger(), nullable=False),
        sa.Column("send_resolved", sa.Boolean(), nullable=False),
        sa.Column("refresh", sa.Boolean(), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("repeats", sa.BigInteger(), nullable=False),
        sa.Column("told_ns", sa.BigInteger(), nullable=False),
        sa.Column("due_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("project", "key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_alert_groups_run_id", "alert_groups", ["run_id"])
    op.create_index("ix_alert_groups_due_ns", "alert_groups", ["due_ns"])
    op.create_table(
        "alert_group_members",
        sa.Column("group_id", _ID, nullable=False),
        sa.Column("standing_id", _ID, nullable=False),
        sa.Column("told_episode", sa.BigInteger(), nullable=False),
        sa.Column("told_phase", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["alert_groups.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["standing_id"], ["alert_standings.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("group_id", "standing_id"),
    )
    op.create_index("ix_alert_group_members_standing_id", "alert_group_members", ["standing_id"])
    op.create_table(
        "muted_notifications",
        sa.Column("id", _ID, nullable=False),
        sa.Column("standing_id", _ID, nullable=False),
        sa.Column("episode", sa.BigInteger(), nullable=False),
        sa.Column("receiver", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.String(length=256), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["standing_id"], ["alert_standings.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("standing_id", "episode", "receiver", "reason", "detail"),
    )


def _stops() -> None:
    op.create_table(
        "stop_grants",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("rule", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("judges", sa.JSON(), nullable=False),
        sa.Column("granted_by", sa.String(length=256), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("granted_ns", sa.BigInteger(), nullable=False),
        sa.Column("revoked_by", sa.String(length=256), nullable=False),
        sa.Column("revoked_reason", sa.Text(), nullable=False),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("stop_grants_by_digest", "stop_grants", ["project", "digest"])
    op.create_table(
        "stop_audit",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("who", sa.String(length=256), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("stop_audit_by_run", "stop_audit", ["project", "run", "id"])
    op.create_index("stop_audit_by_project", "stop_audit", ["project", "id"])


def _fill_fingerprints() -> None:
    """Create alert instances of existing alerts, so that they have acknowledgements and groups like new ones."""
    alerts = sa.table("alerts", sa.column("id"), sa.column("config_id"), sa.column("fingerprint"))
    configs = sa.table(
        "rule_configs", sa.column("id"), sa.column("run_id"), sa.column("origin"), sa.column("name"),
        sa.column("data", sa.JSON),
    )  # fmt: skip
    runs = sa.table("runs", sa.column("id"), sa.column("project"), sa.column("run"))
    bind = op.get_bind()
    rows = bind.execute(
        sa.select(
            alerts.c.id, runs.c.project, runs.c.run, configs.c.name, configs.c.origin, configs.c.data
        ).select_from(
            alerts.join(configs, configs.c.id == alerts.c.config_id).join(runs, runs.c.id == configs.c.run_id)
        )
    ).all()
    for number, project, run, name, origin, data in rows:
        # As the service computed them when this migration was written; it must not follow later changes.
        labels = (data or {}).get("labels") or {}
        named = [project, run, name, origin == "recorder", sorted(labels.items())]
        text = json.dumps(named, separators=(",", ":")).encode()
        fingerprint = hashlib.sha256(text).hexdigest()[:32]
        bind.execute(alerts.update().where(alerts.c.id == number).values(fingerprint=fingerprint))


def _only_grows() -> None:
    """Have the database refuse to change or delete entries of the audit log."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION watchstep_only_grows() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'stop_audit only grows'; END $$"
        )
        op.execute(
            "CREATE TRIGGER stop_audit_only_grows BEFORE UPDATE OR DELETE ON stop_audit "
            "FOR EACH ROW EXECUTE FUNCTION watchstep_only_grows()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER stop_audit_no_{verb.lower()} BEFORE {verb} ON stop_audit "
            "BEGIN SELECT RAISE(ABORT, 'stop_audit only grows'); END"
        )
