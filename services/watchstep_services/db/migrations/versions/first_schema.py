"""The first schema. Later revisions change it; the tables are stated here and not taken from the models, which follow the newest revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = sa.MetaData()
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    TABLES.create_all(op.get_bind(), checkfirst=False)
    _refuse_changes_of_the_audit_log()


def downgrade() -> None:
    TABLES.drop_all(op.get_bind(), checkfirst=False)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION watchstep_only_grows()")


def _refuse_changes_of_the_audit_log() -> None:
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


sa.Table(
    "api_requests",
    TABLES,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("request", sa.String(64), nullable=False),
    sa.Column("status", sa.BigInteger),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("claimed_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_ns", sa.BigInteger, nullable=False),
    sa.Index("ix_api_requests_expires_ns", "expires_ns"),
)

sa.Table(
    "backends",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("name", sa.String(32), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("settings", sa.JSON, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("updated_ns", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("name"),
)

sa.Table(
    "clock_marks",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("seen_ns", sa.BigInteger, nullable=False),
    sa.Column("before_ns", sa.BigInteger, nullable=False),
    sa.Column("stepped_ns", sa.BigInteger, nullable=False),
)

sa.Table(
    "projects",
    TABLES,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("description", sa.Text, nullable=False, server_default=""),
    sa.Column("created_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("archived_ns", sa.BigInteger),
    sa.Column("deferred_until_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("turn_run_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("turn_epoch", sa.BigInteger, nullable=False, server_default="0"),
)

sa.Table(
    "receivers",
    TABLES,
    sa.Column("project", sa.String(128), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("written_ns", sa.BigInteger, nullable=False),
    sa.Column("written_by", sa.String(256), nullable=False),
)

sa.Table(
    "routing_trees",
    TABLES,
    sa.Column("project", sa.String(128), primary_key=True),
    sa.Column("tree", sa.JSON, nullable=False),
    sa.Column("written_ns", sa.BigInteger, nullable=False),
    sa.Column("written_by", sa.String(256), nullable=False),
)

sa.Table(
    "stop_audit",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), nullable=False),
    sa.Column("run", sa.String(128), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String(256), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index("stop_audit_by_project", "project", "id"),
    sa.Index("stop_audit_by_run", "project", "run", "id"),
)

sa.Table(
    "stores",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("role_arn", sa.Text, nullable=False),
    sa.Column("external_id", sa.Text, nullable=False),
    sa.Column("region", sa.String(64), nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("updated_ns", sa.BigInteger, nullable=False),
    sa.Column("is_own", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.UniqueConstraint("name"),
)

sa.Table(
    "backtests",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("runs", sa.JSON, nullable=False),
    sa.Column("rules", sa.JSON, nullable=False),
    sa.Column("sweeps", sa.JSON, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("next", sa.BigInteger, nullable=False),
    sa.Column("claims", sa.BigInteger, nullable=False),
    sa.Column("tries", sa.BigInteger, nullable=False),
    sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("finished_ns", sa.BigInteger),
    sa.Index("ix_backtests_state", "state"),
)

sa.Table(
    "job_owners",
    TABLES,
    sa.Column("job", sa.String(64), primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
)

sa.Table(
    "project_backends",
    TABLES,
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
    sa.Column("backend_id", _ID, sa.ForeignKey("backends.id"), primary_key=True),
    sa.Index("ix_project_backends_backend_id", "backend_id"),
)

sa.Table(
    "project_captures",
    TABLES,
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("changed_ns", sa.BigInteger, nullable=False),
    sa.Column("changed_by", sa.String(256), nullable=False),
)

sa.Table(
    "project_rules",
    TABLES,
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("rule", sa.String(128), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("changed_ns", sa.BigInteger, nullable=False),
)

sa.Table(
    "project_stores",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("store_id", _ID, sa.ForeignKey("stores.id"), nullable=False),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("is_current", sa.Boolean, nullable=False),
    sa.Column("listed_ns", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("project", "store_id", "prefix"),
    sa.Index("ix_project_stores_store_id", "store_id"),
    sa.Index(
        "project_stores_current",
        "project",
        unique=True,
        sqlite_where=sa.text("is_current"),
        postgresql_where=sa.text("is_current"),
    ),
)

sa.Table(
    "receiver_secrets",
    TABLES,
    sa.Column("project", sa.String(128), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("field", sa.String(64), primary_key=True),
    sa.Column("encrypted", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["project", "name"], ["receivers.project", "receivers.name"], ondelete="CASCADE"),
)

sa.Table(
    "retention_policies",
    TABLES,
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
    sa.Column("compact_after_s", sa.BigInteger),
    sa.Column("originals_s", sa.BigInteger),
    sa.Column("keep_tensors_s", sa.BigInteger),
    sa.Column("keep_runs_s", sa.BigInteger),
    sa.Column("changed_by", sa.String(128), nullable=False),
    sa.Column("changed_ns", sa.BigInteger, nullable=False),
)

sa.Table(
    "silences",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("matchers", sa.JSON, nullable=False),
    sa.Column("author", sa.String(256), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("suppresses_stop", sa.Boolean, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("starts_ns", sa.BigInteger, nullable=False),
    sa.Column("ends_ns", sa.BigInteger, nullable=False),
    sa.Column("expired_by", sa.String(256), nullable=False),
    sa.Index("silences_by_end", "project", "ends_ns"),
)

sa.Table(
    "stop_grants",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("rule", sa.String(128), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("judges", sa.JSON, nullable=False),
    sa.Column("granted_by", sa.String(256), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("granted_ns", sa.BigInteger, nullable=False),
    sa.Column("revoked_by", sa.String(256), nullable=False),
    sa.Column("revoked_reason", sa.Text, nullable=False),
    sa.Column("revoked_ns", sa.BigInteger),
    sa.Index("stop_grants_by_digest", "project", "digest"),
)

sa.Table(
    "backtest_results",
    TABLES,
    sa.Column("backtest_id", _ID, sa.ForeignKey("backtests.id"), primary_key=True),
    sa.Column("place", sa.BigInteger, primary_key=True),
    sa.Column("result", sa.JSON, nullable=False),
)

sa.Table(
    "runs",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("run", sa.String(128), nullable=False),
    sa.Column("project_store_id", _ID, sa.ForeignKey("project_stores.id"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("state_attempt", sa.String(128), nullable=False, server_default=""),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
    sa.Column("cursor", sa.Text, nullable=False),
    sa.Column("journal", sa.BigInteger, nullable=False),
    sa.Column("ticks", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("control", sa.JSON, nullable=False),
    sa.Column("health", sa.JSON, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_ns", sa.BigInteger),
    sa.Column("last_seen_ns", sa.BigInteger, nullable=False),
    sa.Column("listed_ns", sa.BigInteger, nullable=False),
    sa.Column("due_ns", sa.BigInteger),
    sa.Column("hints", sa.BigInteger, nullable=False),
    sa.Column("requested_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("poll_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("poll_interval_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("ignored_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_by", sa.String(255), nullable=False, server_default=""),
    sa.Column("urgent_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("registered_by", sa.String(16), nullable=False, server_default=""),
    sa.Column("unfinished_claims", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reading", sa.Text, nullable=False, server_default=""),
    sa.Column("waits_for_turn", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("registered_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("evaluated_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("project", "run"),
    sa.Index("ix_runs_due_ns", "due_ns"),
    sa.Index("ix_runs_poll_ns", "poll_ns"),
    sa.Index("ix_runs_project_store_id", "project_store_id"),
    sa.Index("ix_runs_state", "state"),
    sqlite_autoincrement=True,
)

sa.Table(
    "actions",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("key", sa.String(700), nullable=False),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("event_id", sa.String(36), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("stage", sa.BigInteger, nullable=False),
    sa.Column("stage_since_ns", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("claims", sa.BigInteger, nullable=False),
    sa.Column("tries", sa.BigInteger, nullable=False),
    sa.Column("next_ns", sa.BigInteger, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("finished_ns", sa.BigInteger),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("traceparent", sa.String(55), nullable=False, server_default=""),
    sa.UniqueConstraint("key"),
    sa.Index("actions_by_due", "state", "next_ns"),
    sa.Index("ix_actions_run_id", "run_id"),
)

sa.Table(
    "alert_groups",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("key", sa.String(64), nullable=False),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE")),
    sa.Column("receiver", sa.String(128), nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("wait_ns", sa.BigInteger, nullable=False),
    sa.Column("interval_ns", sa.BigInteger, nullable=False),
    sa.Column("repeat_ns", sa.BigInteger, nullable=False),
    sa.Column("send_resolved", sa.Boolean, nullable=False),
    sa.Column("refresh", sa.Boolean, nullable=False),
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("repeats", sa.BigInteger, nullable=False),
    sa.Column("notified_ns", sa.BigInteger, nullable=False),
    sa.Column("due_ns", sa.BigInteger),
    sa.UniqueConstraint("project", "key"),
    sa.Index("ix_alert_groups_due_ns", "due_ns"),
    sa.Index("ix_alert_groups_run_id", "run_id"),
    sqlite_autoincrement=True,
)

sa.Table(
    "alert_instances",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("fingerprint", sa.String(32), nullable=False),
    sa.Column("config_id", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("rule", sa.String(128), nullable=False),
    sa.Column("severity", sa.String(16), nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("receivers", sa.JSON, nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),
    sa.Column("episode", sa.BigInteger, nullable=False),
    sa.Column("dry_run", sa.Boolean, nullable=False),
    sa.Column("inhibited_by", sa.String(128), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
    sa.Column("fired_ns", sa.BigInteger, nullable=False),
    sa.Column("resolved_ns", sa.BigInteger),
    sa.Column("event_id", sa.String(36), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("explanation", sa.JSON, nullable=False),
    sa.Column("finding", sa.JSON, nullable=False),
    sa.Column("incident", sa.String(16), nullable=False, server_default=""),
    sa.Column("acknowledged_by", sa.String(256), nullable=False),
    sa.Column("acknowledged_ns", sa.BigInteger),
    sa.Column("acknowledgement", sa.Text, nullable=False),
    sa.Column("was_right", sa.String(8), nullable=False, server_default=""),
    sa.UniqueConstraint("run_id", "fingerprint"),
    sa.Index("ix_alert_instances_fingerprint", "fingerprint"),
)

sa.Table(
    "attempts",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("world_size", sa.BigInteger, nullable=False),
    sa.Column("on_stop", sa.String(16), nullable=False),
    sa.Column("started_ns", sa.BigInteger, nullable=False),
    sa.Column("first_seen_ns", sa.BigInteger, nullable=False),
    sa.Column("watermark", sa.BigInteger, nullable=False),
    sa.Column("largest", sa.BigInteger, nullable=False),
    sa.Column("ranks", sa.JSON, nullable=False),
    sa.Column("ends", sa.JSON, nullable=False),
    sa.Column("context", sa.JSON, nullable=False),
    sa.Column("ticks", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("journaled", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("journal_parts", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("journal_due_ns", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("run_id", "attempt"),
)

sa.Table(
    "events",
    TABLES,
    sa.Column("number", _ID, primary_key=True),
    sa.Column("id", sa.String(36), nullable=False),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("type", sa.String(64), nullable=False),
    sa.Column("event", sa.JSON, nullable=False),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("id"),
    sa.Index("ix_events_run_id", "run_id"),
    sqlite_autoincrement=True,
)

sa.Table(
    "incidents",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("key", sa.String(16), nullable=False),
    sa.Column("first_step", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("onsets", sa.JSON, nullable=False),
    sa.Column("summary", sa.JSON, nullable=False),
    sa.UniqueConstraint("run_id", "key"),
    sa.Index("incidents_by_step", "run_id", "last_step"),
)

sa.Table(
    "jobs",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("backend", sa.String(32), nullable=False),
    sa.Column("job_id", sa.String(256), nullable=False),
    sa.Column("identity", sa.JSON, nullable=False),
    sa.Column("bound_by", sa.String(32), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("exit_code", sa.BigInteger),
    sa.Column("gone_ns", sa.BigInteger),
    sa.UniqueConstraint("run_id", "attempt"),
)

sa.Table(
    "rule_configs",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("origin", sa.String(16), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("rule", sa.String(128), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("granted_stop", sa.Boolean, nullable=False),
    sa.UniqueConstraint("run_id", "origin", "name"),
)

sa.Table(
    "run_summaries",
    TABLES,
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
    sa.Column("program", sa.String(128), nullable=False),
    sa.Column("ended_ns", sa.BigInteger, nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Index("run_summaries_by_program", "project", "program", "ended_ns"),
)

sa.Table(
    "run_tags",
    TABLES,
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("tag", sa.String(64), primary_key=True),
    sa.Column("added_ns", sa.BigInteger, nullable=False),
    sa.Column("added_by", sa.String(256), nullable=False),
)

sa.Table(
    "segments",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("node", sa.String(128), nullable=False),
    sa.Column("writer", sa.String(128), nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("first", sa.BigInteger, nullable=False),
    sa.Column("last", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("found_ns", sa.BigInteger, nullable=False),
    sa.Column("position", sa.BigInteger),
    sa.Column("ranks", sa.JSON),
    sa.Column("problem", sa.Text, nullable=False),
    sa.Column("traceparent", sa.String(55), nullable=False, server_default=""),
    sa.UniqueConstraint("run_id", "attempt", "node", "writer", "seq"),
    sa.Index("segments_by_position", "run_id", "position"),
    sa.Index("segments_by_state", "run_id", "state"),
)

sa.Table(
    "ticks",
    TABLES,
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("tick", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False, server_default=sa.false()),
)

sa.Table(
    "tokens",
    TABLES,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("project", sa.String(128)),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id")),
    sa.Column("maker", sa.String(16), nullable=False, server_default=""),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("created_by", sa.String(256), nullable=False),
    sa.Column("expires_ns", sa.BigInteger),
    sa.Column("revoked_ns", sa.BigInteger),
    sa.Column("revoked_by", sa.String(256), nullable=False),
    sa.Column("last_used_ns", sa.BigInteger),
    sa.Index("ix_tokens_maker", "maker"),
    sa.Index("ix_tokens_project", "project"),
    sa.Index("ix_tokens_run_id", "run_id"),
)

sa.Table(
    "upkeep",
    TABLES,
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("ended_ns", sa.BigInteger, nullable=False),
    sa.Column("next_ns", sa.BigInteger, nullable=False),
    sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
    sa.Column("claims", sa.BigInteger, nullable=False),
    sa.Column("summarized_ns", sa.BigInteger),
    sa.Column("compacted_ns", sa.BigInteger),
    sa.Column("originals_gone_ns", sa.BigInteger),
    sa.Column("tensors_gone_ns", sa.BigInteger),
    sa.Column("deleting", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("on_hold", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("hold_by", sa.String(128), nullable=False),
    sa.Column("hold_reason", sa.Text, nullable=False),
    sa.Column("tries", sa.BigInteger, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    sa.Index("ix_upkeep_next_ns", "next_ns"),
)

sa.Table(
    "watermarks",
    TABLES,
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("tick", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("cause", sa.String(16), nullable=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
)

sa.Table(
    "action_tries",
    TABLES,
    sa.Column("action_id", _ID, sa.ForeignKey("actions.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
)

sa.Table(
    "alert_group_members",
    TABLES,
    sa.Column("group_id", _ID, sa.ForeignKey("alert_groups.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("instance_id", _ID, sa.ForeignKey("alert_instances.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("notified_episode", sa.BigInteger, nullable=False),
    sa.Column("notified_phase", sa.String(16), nullable=False),
    sa.Index("ix_alert_group_members_instance_id", "instance_id"),
)

sa.Table(
    "alerts",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("run_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("config_id", _ID, sa.ForeignKey("rule_configs.id"), nullable=False),
    sa.Column("fingerprint", sa.String(32), nullable=False, server_default=""),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("rule", sa.String(128), nullable=False),
    sa.Column("severity", sa.String(16), nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),
    sa.Column("finding", sa.JSON),
    sa.Column("details", sa.JSON),
    sa.Column("since_step", sa.BigInteger, nullable=False),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
    sa.Column("fired_ns", sa.BigInteger),
    sa.Column("incident", sa.String(16), nullable=False, server_default=""),
    sa.Column("resolved_ns", sa.BigInteger),
    sa.UniqueConstraint("config_id", "attempt"),
    sa.Index("ix_alerts_run_id", "run_id"),
)

sa.Table(
    "findings",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("config_id", _ID, sa.ForeignKey("rule_configs.id"), nullable=False),
    sa.Column("attempt", sa.String(128), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("finding", sa.JSON, nullable=False),
    sa.Index("findings_by_config", "config_id", "attempt"),
)

sa.Table(
    "muted_notifications",
    TABLES,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("instance_id", _ID, sa.ForeignKey("alert_instances.id", ondelete="CASCADE"), nullable=False),
    sa.Column("episode", sa.BigInteger, nullable=False),
    sa.Column("receiver", sa.String(128), nullable=False),
    sa.Column("reason", sa.String(16), nullable=False),
    sa.Column("detail", sa.String(256), nullable=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("instance_id", "episode", "receiver", "reason", "detail"),
)

sa.Table(
    "pinned_baselines",
    TABLES,
    sa.Column("attempt_id", _ID, sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("baseline", sa.Text, nullable=False),
)

sa.Table(
    "rule_states",
    TABLES,
    sa.Column("config_id", _ID, sa.ForeignKey("rule_configs.id"), primary_key=True),
    sa.Column("attempt", sa.String(128), primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("findings", sa.BigInteger, nullable=False),
    sa.Column("reported_health", sa.String(16), nullable=False, server_default=""),
)
