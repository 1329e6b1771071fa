"""The attempt of the last published start, so that its end is published if another attempt replaces it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as runs:
        runs.add_column(sa.Column("state_attempt", sa.String(128), server_default="", nullable=False))
    op.execute("UPDATE runs SET state_attempt = attempt WHERE state = 'running'")


def downgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as runs:
        runs.drop_column("state_attempt")
