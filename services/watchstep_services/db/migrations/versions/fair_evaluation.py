"""When a run is polled next, when a message for it was last sent, and which worker has cached its earlier rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OF_RUNS = ("asked_ns", "look_ns", "quiet_ns")


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as batch_op:
        for name in _OF_RUNS:
            batch_op.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("holder", sa.String(255), nullable=False, server_default=""))
        batch_op.create_index("ix_runs_look_ns", ["look_ns"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.drop_index("ix_runs_look_ns")
        batch_op.drop_column("holder")
        for name in reversed(_OF_RUNS):
            batch_op.drop_column(name)
