"""Requests with idempotency keys; rule configs of projects; events with numbers that are never reused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_requests",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("claimed_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    with op.batch_alter_table("api_requests", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_api_requests_expires_ns"), ["expires_ns"], unique=False)
    op.create_table(
        "project_rules",
        sa.Column("project", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("rule", sa.String(128), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("changed_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("project", "name"),
    )
    _renumber(autoincrement=True)


def downgrade() -> None:
    _renumber(autoincrement=False)
    op.drop_table("project_rules")
    op.drop_table("api_requests")


def _renumber(*, autoincrement: bool) -> None:
    """SQLite reuses the number of a deleted last event by default, so that a client that follows events would miss one."""
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "events", schema=None, recreate="always", table_kwargs={"sqlite_autoincrement": autoincrement}
        ):
            pass
