"""The data from which the journal on the store is written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OF_ATTEMPTS = ("ticks", "journaled", "journal_parts")


def upgrade() -> None:
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        for name in _OF_ATTEMPTS:
            batch_op.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("segments", schema=None) as batch_op:
        batch_op.add_column(sa.Column("ranks", sa.JSON(none_as_null=True), nullable=True))
    with op.batch_alter_table("ticks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("ended", sa.Boolean(), nullable=False, server_default=sa.false()))
    # The evaluations of an attempt that was evaluated before are written together with the next one.
    op.execute(
        "UPDATE attempts SET ticks = COALESCE((SELECT MAX(ticks.tick) + 1 FROM ticks "
        "WHERE ticks.run_id = attempts.run_id AND ticks.attempt = attempts.attempt), 0)"
    )


def downgrade() -> None:
    with op.batch_alter_table("ticks", schema=None) as batch_op:
        batch_op.drop_column("ended")
    with op.batch_alter_table("segments", schema=None) as batch_op:
        batch_op.drop_column("ranks")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        for name in reversed(_OF_ATTEMPTS):
            batch_op.drop_column(name)
