"""Projects on several stores; runs that stay on the store that they were registered with; when a run was last evaluated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_CURRENT = sa.text("is_current")
_RUNS = "fk_runs_project_store_id_project_stores"


def upgrade() -> None:
    with op.batch_alter_table("stores", schema=None) as stores:
        stores.add_column(sa.Column("is_own", sa.Boolean(), server_default=sa.false(), nullable=False))
    # Names that only a service gives to the store that it is started on.
    op.execute(
        sa.text("UPDATE stores SET is_own = true WHERE name = 'default' OR name LIKE 'default-________'")
    )
    columns = sa.text("SELECT project, store_id, prefix FROM project_stores ORDER BY project")
    placed = [dict(row) for row in op.get_bind().execute(columns).mappings()]
    op.drop_table("project_stores")
    table = op.create_table(
        "project_stores",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), nullable=False),
        sa.Column("store_id", _ID, sa.ForeignKey("stores.id"), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("is_current", sa.Boolean(), nullable=False),
        sa.Column("listed_ns", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("project", "store_id", "prefix"),
    )
    op.create_index("ix_project_stores_store_id", "project_stores", ["store_id"])
    op.create_index(
        "project_stores_current", "project_stores", ["project"],
        unique=True, sqlite_where=_CURRENT, postgresql_where=_CURRENT,
    )  # fmt: skip
    op.bulk_insert(table, [{**row, "is_current": True, "listed_ns": 0} for row in placed])
    with op.batch_alter_table("projects", schema=None) as projects:
        projects.drop_column("listed_ns")
    with op.batch_alter_table("runs", schema=None) as runs:
        runs.add_column(sa.Column("project_store_id", _ID, nullable=True))
        runs.add_column(sa.Column("registered_ns", sa.BigInteger(), server_default="0", nullable=False))
        runs.add_column(sa.Column("evaluated_ns", sa.BigInteger(), server_default="0", nullable=False))
    op.execute(
        sa.text(
            "UPDATE runs SET project_store_id = (SELECT id FROM project_stores WHERE project_stores.project = runs.project)"
        )
    )
    with op.batch_alter_table("runs", schema=None, table_kwargs={"sqlite_autoincrement": True}) as runs:
        runs.alter_column("project_store_id", existing_type=_ID, nullable=False)
        runs.create_foreign_key(_RUNS, "project_stores", ["project_store_id"], ["id"])
        runs.create_index("ix_runs_project_store_id", ["project_store_id"])


def downgrade() -> None:
    """Keep one store for each project, that of its new runs. The earlier service does not read runs on others."""
    with op.batch_alter_table("runs", schema=None, table_kwargs={"sqlite_autoincrement": True}) as runs:
        runs.drop_index("ix_runs_project_store_id")
        runs.drop_constraint(_RUNS, type_="foreignkey")
        runs.drop_column("project_store_id")
        runs.drop_column("registered_ns")
        runs.drop_column("evaluated_ns")
    with op.batch_alter_table("projects", schema=None) as projects:
        projects.add_column(sa.Column("listed_ns", sa.BigInteger(), server_default="0", nullable=False))
    with op.batch_alter_table("projects", schema=None) as projects:
        projects.alter_column("listed_ns", existing_type=sa.BigInteger(), server_default=None)
    columns = sa.text("SELECT project, store_id, prefix FROM project_stores WHERE is_current")
    placed = [dict(row) for row in op.get_bind().execute(columns).mappings()]
    op.drop_table("project_stores")
    table = op.create_table(
        "project_stores",
        sa.Column("project", sa.String(128), sa.ForeignKey("projects.name"), primary_key=True),
        sa.Column("store_id", _ID, sa.ForeignKey("stores.id"), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
    )
    op.create_index("ix_project_stores_store_id", "project_stores", ["store_id"])
    op.bulk_insert(table, placed)
    with op.batch_alter_table("stores", schema=None) as stores:
        stores.drop_column("is_own")
