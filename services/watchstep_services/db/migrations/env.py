"""Alembic's entry point: runs on the connection that `upgrade` and `downgrade` pass."""

from __future__ import annotations

from alembic import context

from watchstep_services.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()
