"""The state and exit code of jobs that are over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(sa.text("UPDATE jobs SET state = 'ended' WHERE state = 'gone' AND exit_code IS NOT NULL"))
    op.execute(sa.text("UPDATE jobs SET state = 'vanished' WHERE state = 'gone'"))


def downgrade() -> None:
    op.execute(sa.text("UPDATE jobs SET state = 'gone' WHERE state IN ('ended', 'cancelled', 'vanished')"))
