"""Claims of a run that ended with their process, and the segment that was being read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as table:
        table.add_column(sa.Column("unfinished_claims", sa.BigInteger(), server_default="0", nullable=False))
        table.add_column(sa.Column("reading", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as table:
        table.drop_column("reading")
        table.drop_column("unfinished_claims")
