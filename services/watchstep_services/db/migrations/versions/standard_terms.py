"""Standard terms: watermarks, alert instances, rule states, polls, when a recorder was last seen, and types of events.

Renamed in place on both databases, so that rows, keys and references stay: `ALTER TABLE … RENAME` copies nothing. Types of events
get the reverse DNS prefix that CloudEvents recommends, in the column and in the JSON of events and of webhooks that are still due.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

TABLES = {
    "seals": "watermarks",
    "alert_standings": "alert_instances",
    "rule_memories": "rule_states",
    "job_holders": "job_owners",
}
COLUMNS = {
    "runs": {
        "heard_ns": "last_seen_ns",
        "look_ns": "poll_ns",
        "quiet_ns": "poll_interval_ns",
        "asked_ns": "requested_ns",
        "holder": "cached_by",
    },
    "attempts": {"sealed": "watermark", "first_heard_ns": "first_seen_ns"},
    "rule_states": {"memory": "state", "told_health": "reported_health"},
    "alert_groups": {"told_ns": "notified_ns"},
    "alert_group_members": {
        "standing_id": "instance_id",
        "told_episode": "notified_episode",
        "told_phase": "notified_phase",
    },
    "muted_notifications": {"standing_id": "instance_id"},
    "receiver_secrets": {"sealed": "encrypted"},
    "silences": {"holds_stop": "suppresses_stop"},
    "upkeep": {"held": "on_hold", "held_by": "hold_by", "held_why": "hold_reason"},
}
INDEXES = {
    "runs": {"ix_runs_look_ns": ("ix_runs_poll_ns", "look_ns", "poll_ns")},
    "alert_instances": {
        "ix_alert_standings_fingerprint": ("ix_alert_instances_fingerprint", "fingerprint", "fingerprint")
    },
    "alert_group_members": {
        "ix_alert_group_members_standing_id": (
            "ix_alert_group_members_instance_id",
            "standing_id",
            "instance_id",
        )
    },
}

OLD_PREFIX, NEW_PREFIX = "watchstep.", "io.watchstep."
EVENTS_IN_JSON = (("events", "event"), ("actions", "payload"))


def upgrade() -> None:
    _rename_event_types(OLD_PREFIX, NEW_PREFIX)
    for old, new in TABLES.items():
        op.rename_table(old, new)
    for table, columns in COLUMNS.items():
        for old, new in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    for table, indexes in INDEXES.items():
        for old, (new, _, column) in indexes.items():
            op.drop_index(old, table)
            op.create_index(new, table, [column])


def downgrade() -> None:
    for table, columns in COLUMNS.items():
        for old, new in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {new} TO {old}")
    for table, indexes in INDEXES.items():
        for old, (new, column, _) in indexes.items():
            op.drop_index(new, table)
            op.create_index(old, table, [column])
    for old, new in TABLES.items():
        op.rename_table(new, old)
    _rename_event_types(NEW_PREFIX, OLD_PREFIX)


def _rename_event_types(old: str, new: str) -> None:
    """Replace the prefix. In the JSON as text: a quote within a value is escaped there, so that only a key matches."""
    op.execute(
        f"UPDATE events SET type = '{new}' || substr(type, {len(old) + 1}) WHERE type LIKE '{old}%'"  # noqa: S608 - constants
    )
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    for table, column in EVENTS_IN_JSON:
        was, becomes = (f'\'"type": "{prefix}\'' for prefix in (old, new))
        text = f"CAST({column} AS TEXT)" if is_postgresql else column
        changed = f"replace({text}, {was}, {becomes})"
        value = f"CAST({changed} AS JSON)" if is_postgresql else changed
        op.execute(f"UPDATE {table} SET {column} = {value} WHERE {text} LIKE '%' || {was} || '%'")  # noqa: S608
