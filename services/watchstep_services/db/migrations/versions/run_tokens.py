"""Tokens of single runs, the tokens that created them, and the operator's token that registered a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_RUNS = "fk_tokens_run_id_runs"


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as table:
        table.add_column(sa.Column("registered_by", sa.String(length=16), server_default="", nullable=False))
    with op.batch_alter_table("tokens", schema=None) as table:
        table.add_column(
            sa.Column("run_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True)
        )
        table.add_column(sa.Column("maker", sa.String(length=16), server_default="", nullable=False))
        table.create_foreign_key(_RUNS, "runs", ["run_id"], ["id"])
        table.create_index(op.f("ix_tokens_run_id"), ["run_id"], unique=False)
        table.create_index(op.f("ix_tokens_maker"), ["maker"], unique=False)


def downgrade() -> None:
    """Drop tokens of single runs, because the earlier tables would treat them as valid for their whole project."""
    op.execute(sa.text("DELETE FROM tokens WHERE run_id IS NOT NULL"))
    with op.batch_alter_table("tokens", schema=None) as table:
        table.drop_index(op.f("ix_tokens_maker"))
        table.drop_index(op.f("ix_tokens_run_id"))
        table.drop_constraint(_RUNS, type_="foreignkey")
        table.drop_column("maker")
        table.drop_column("run_id")
    with op.batch_alter_table("runs", schema=None) as table:
        table.drop_column("registered_by")
