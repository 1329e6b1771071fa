"""Registered stores and backends of projects."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_NAME = 128
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _make_tables()
    op.add_column("projects", sa.Column("description", sa.Text(), nullable=False, server_default=""))
    op.add_column("projects", sa.Column("created_ns", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("projects", sa.Column("archived_ns", sa.BigInteger(), nullable=True))
    connection = op.get_bind()
    _register_stores(connection)
    _register_local(connection)
    _hold_jobs(connection)
    # Not in a batch, which on SQLite would recreate the table, because other tables refer to it.
    op.execute("ALTER TABLE projects DROP COLUMN store_url")


def downgrade() -> None:
    op.add_column("projects", sa.Column("store_url", sa.Text(), nullable=False, server_default=""))
    connection = op.get_bind()
    rows = connection.execute(
        sa.text("SELECT p.project, s.url, p.prefix FROM project_stores p JOIN stores s ON s.id = p.store_id")
    ).all()
    for project, url, prefix in rows:
        connection.execute(
            sa.text("UPDATE projects SET store_url = :url WHERE name = :name"),
            {"url": f"{url.rstrip('/')}/{prefix}" if prefix else url, "name": project},
        )
    for column in ("archived_ns", "created_ns", "description"):
        op.execute(f"ALTER TABLE projects DROP COLUMN {column}")
    op.drop_table("job_holders")
    op.drop_table("project_backends")
    op.drop_table("backends")
    op.drop_table("project_stores")
    op.drop_table("stores")


def _make_tables() -> None:
    op.create_table(
        "stores",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.String(_NAME), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("role_arn", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=False),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "project_stores",
        sa.Column("project", sa.String(_NAME), nullable=False),
        sa.Column("store_id", _ID, nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"]),
        sa.PrimaryKeyConstraint("project"),
    )
    op.create_index("ix_project_stores_store_id", "project_stores", ["store_id"])
    op.create_table(
        "backends",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "project_backends",
        sa.Column("project", sa.String(_NAME), nullable=False),
        sa.Column("backend_id", _ID, nullable=False),
        sa.ForeignKeyConstraint(["backend_id"], ["backends.id"]),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("project", "backend_id"),
    )
    op.create_index("ix_project_backends_backend_id", "project_backends", ["backend_id"])
    op.create_table(
        "job_holders",
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("project", sa.String(_NAME), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"]),
        sa.PrimaryKeyConstraint("job"),
    )


def _register_stores(connection: sa.Connection) -> None:
    """Register each URL of a project as a store, so that nothing changes for the projects."""
    rows = connection.execute(sa.text("SELECT name, store_url FROM projects ORDER BY name")).all()
    numbers: dict[str, int] = {}
    for project, url in rows:
        if url not in numbers:
            number = numbers[url] = len(numbers) + 1
            connection.execute(
                sa.text(
                    "INSERT INTO stores (name, url, role_arn, external_id, region, endpoint, version, "
                    "created_ns, updated_ns) VALUES (:name, :url, '', '', '', '', 1, 0, 0)"
                ),
                {"name": "default" if number == 1 else f"default-{number}", "url": url},
            )
        connection.execute(
            sa.text(
                "INSERT INTO project_stores (project, store_id, prefix) "
                "SELECT :project, id, '' FROM stores WHERE url = :url"
            ),
            {"project": project, "url": url},
        )


def _register_local(connection: sa.Connection) -> None:
    """Allow local jobs as before: to all projects of an embedded service, and to projects with such a job."""
    if connection.execute(sa.text("SELECT name FROM projects LIMIT 1")).first() is None:
        return
    connection.execute(
        sa.text(
            "INSERT INTO backends (name, kind, settings, version, created_ns, updated_ns) "
            "VALUES ('local', 'local', '{}', 1, 0, 0)"
        )
    )
    connection.execute(
        sa.text(
            "INSERT INTO project_backends (project, backend_id) SELECT p.name, b.id FROM projects p, backends b "
            "WHERE b.name = 'local' AND (:embedded = 1 OR p.name IN (SELECT r.project FROM runs r "
            "JOIN jobs j ON j.run_id = r.id WHERE j.backend = 'local'))"
        ),
        {"embedded": int(connection.dialect.name == "sqlite")},
    )


def _hold_jobs(connection: sa.Connection) -> None:
    """Record the project that first bound a job as its owner."""
    jobs = sa.table(
        "jobs",
        *map(sa.column, ("id", "run_id", "backend", "job_id")),
        sa.column("identity", sa.JSON()),
    )
    runs = sa.table("runs", sa.column("id"), sa.column("project"))
    rows = connection.execute(
        sa.select(jobs.c.backend, jobs.c.job_id, jobs.c.identity, runs.c.project)
        .join_from(jobs, runs, runs.c.id == jobs.c.run_id)
        .order_by(jobs.c.id)
    ).all()
    held: dict[str, str] = {}
    for kind, job, identity, project in rows:
        held.setdefault(_digest(str(kind), str(job), identity), str(project))
    for digest, project in held.items():
        connection.execute(
            sa.text("INSERT INTO job_holders (job, project) VALUES (:job, :project)"),
            {"job": digest, "project": project},
        )


def _digest(kind: str, job: str, identity: Any) -> str:
    """As `watchstep_services.tenancy` computed it when this migration was written."""
    if kind == "local":
        what: Any = [kind, *(identity.get(name) for name in ("boot", "pid", "start_ticks"))]
    else:
        what = [kind, job, identity]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
