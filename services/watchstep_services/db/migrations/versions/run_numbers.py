"""Runs with ids that are never reused, because processes cache data by run id."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _renumber(autoincrement=True)


def downgrade() -> None:
    _renumber(autoincrement=False)


def _renumber(*, autoincrement: bool) -> None:
    """SQLite reuses the id of a deleted last run by default; PostgreSQL does not."""
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "runs", schema=None, recreate="always", table_kwargs={"sqlite_autoincrement": autoincrement}
        ):
            pass
