"""The traces of segments and actions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("segments", "actions"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.add_column(
                sa.Column("traceparent", sa.String(length=55), nullable=False, server_default="")
            )


def downgrade() -> None:
    for table in ("actions", "segments"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.drop_column("traceparent")
