"""Turns of large evaluations: one at a time for each project, in all processes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite would otherwise copy the table of runs, and its numbers of deleted runs would come again.
    with op.batch_alter_table("runs", recreate="never") as table:
        table.add_column(sa.Column("waits_for_turn", sa.Boolean(), server_default=sa.false(), nullable=False))
    with op.batch_alter_table("projects", recreate="never") as table:
        table.add_column(sa.Column("turn_run_id", sa.BigInteger(), server_default="0", nullable=False))
        table.add_column(sa.Column("turn_epoch", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("projects", schema=None) as table:
        table.drop_column("turn_epoch")
        table.drop_column("turn_run_id")
    with op.batch_alter_table("runs", schema=None) as table:
        table.drop_column("waits_for_turn")
