"""The time until which the runs of a project are evaluated after those of others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("projects", schema=None) as table:
        table.add_column(sa.Column("deferred_until_ns", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("projects", schema=None) as table:
        table.drop_column("deferred_until_ns")
