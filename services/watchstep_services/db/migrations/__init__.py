"""The schema's history, by Alembic; part of the package, so that an installed service can upgrade itself."""
