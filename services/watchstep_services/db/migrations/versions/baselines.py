"""Summaries of healthy runs, and the baselines that are pinned to attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "run_summaries",
        sa.Column("run_id", _ROW_ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("program", sa.String(length=128), nullable=False),
        sa.Column("ended_ns", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_index("run_summaries_by_program", "run_summaries", ["project", "program", "ended_ns"])
    op.create_table(
        "pinned_baselines",
        sa.Column("attempt_id", _ROW_ID, nullable=False),
        sa.Column("baseline", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"]),
        sa.PrimaryKeyConstraint("attempt_id"),
    )
    with op.batch_alter_table("upkeep", schema=None) as table:
        table.add_column(sa.Column("summarized_ns", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("upkeep", schema=None) as table:
        table.drop_column("summarized_ns")
    op.drop_table("pinned_baselines")
    op.drop_index("run_summaries_by_program", "run_summaries")
    op.drop_table("run_summaries")
