"""Tags of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "run_tags",
        sa.Column("run_id", _ROW_ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("tag", sa.String(64), primary_key=True),
        sa.Column("added_ns", sa.BigInteger(), nullable=False),
        sa.Column("added_by", sa.String(256), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("run_tags")
