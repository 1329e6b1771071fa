"""The highest value of the database's clock, by which a clock that was set back is detected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "clock_marks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("before_ns", sa.BigInteger(), nullable=False),
        sa.Column("stepped_ns", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("clock_marks")
