"""Runs whose numbers are never given twice: what a process remembers of a run that was deleted is no other's."""

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
    """PostgreSQL never does; SQLite gives the number of a deleted last run again, unless it is told not to."""
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "runs", schema=None, recreate="always", table_kwargs={"sqlite_autoincrement": autoincrement}
        ):
            pass
