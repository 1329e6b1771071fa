"""Capture documents of projects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "project_captures",
        sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("changed_ns", sa.BigInteger(), nullable=False),
        sa.Column("changed_by", sa.String(256), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("project_captures")
