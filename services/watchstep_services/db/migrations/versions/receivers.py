"""Receivers and routes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "receivers",
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("written_ns", sa.BigInteger(), nullable=False),
        sa.Column("written_by", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("project", "name"),
    )
    op.create_table(
        "receiver_secrets",
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("field", sa.String(length=64), nullable=False),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project", "name"], ["receivers.project", "receivers.name"], ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("project", "name", "field"),
    )
    op.create_table(
        "routing_trees",
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("tree", sa.JSON(), nullable=False),
        sa.Column("written_ns", sa.BigInteger(), nullable=False),
        sa.Column("written_by", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("project"),
    )


def downgrade() -> None:
    # Trees first, because they refer to receivers.
    op.drop_table("routing_trees")
    op.drop_table("receiver_secrets")
    op.drop_table("receivers")
