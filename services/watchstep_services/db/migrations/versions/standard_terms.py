"""Standard terms: watermarks, alert instances, rule states, polls, and when a recorder was last seen.

Renamed in place on both databases, so that rows, keys and references stay: `ALTER TABLE … RENAME` copies nothing.
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


def upgrade() -> None:
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
