"""Incidents: alerts of an attempt that begin close together, and the incident of each alert."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt", sa.String(128), nullable=False),
        sa.Column("key", sa.String(16), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("onsets", sa.JSON(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "key"),
    )
    op.create_index("incidents_by_step", "incidents", ["run_id", "last_step"])
    for table in ("alerts", "alert_standings"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.add_column(sa.Column("incident", sa.String(16), server_default="", nullable=False))


def downgrade() -> None:
    for table in ("alert_standings", "alerts"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.drop_column("incident")
    op.drop_table("incidents")
