"""Backtests that are requested through the API."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "backtests",
        sa.Column("id", _ID, nullable=False),
        sa.Column("project", sa.String(length=128), nullable=False),
        sa.Column("runs", sa.JSON(), nullable=False),
        sa.Column("rules", sa.JSON(), nullable=False),
        sa.Column("sweeps", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("next", sa.BigInteger(), nullable=False),
        sa.Column("claims", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("finished_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("backtests", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_backtests_state"), ["state"], unique=False)
    op.create_table(
        "backtest_results",
        sa.Column("backtest_id", _ID, nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["backtest_id"], ["backtests.id"]),
        sa.PrimaryKeyConstraint("backtest_id", "place"),
    )


def downgrade() -> None:
    op.drop_table("backtest_results")
    with op.batch_alter_table("backtests", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_backtests_state"))
    op.drop_table("backtests")
