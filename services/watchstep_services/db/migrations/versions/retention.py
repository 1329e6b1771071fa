"""Retention policies and the upkeep of ended runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retention_policies",
        sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
        sa.Column("compact_after_s", sa.BigInteger(), nullable=True),
        sa.Column("originals_s", sa.BigInteger(), nullable=True),
        sa.Column("keep_tensors_s", sa.BigInteger(), nullable=True),
        sa.Column("keep_runs_s", sa.BigInteger(), nullable=True),
        sa.Column("changed_by", sa.String(128), nullable=False),
        sa.Column("changed_ns", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "upkeep",
        sa.Column(
            "run_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.ForeignKey("runs.id"),
            primary_key=True,
        ),
        sa.Column("ended_ns", sa.BigInteger(), nullable=False),
        sa.Column("next_ns", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_ns", sa.BigInteger(), nullable=False),
        sa.Column("claims", sa.BigInteger(), nullable=False),
        sa.Column("compacted_ns", sa.BigInteger(), nullable=True),
        sa.Column("originals_gone_ns", sa.BigInteger(), nullable=True),
        sa.Column("tensors_gone_ns", sa.BigInteger(), nullable=True),
        sa.Column("deleting", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("held", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("held_by", sa.String(128), nullable=False),
        sa.Column("held_why", sa.Text(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
    )
    op.create_index(op.f("ix_upkeep_next_ns"), "upkeep", ["next_ns"])


def downgrade() -> None:
    op.drop_index(op.f("ix_upkeep_next_ns"), "upkeep")
    op.drop_table("upkeep")
    op.drop_table("retention_policies")
