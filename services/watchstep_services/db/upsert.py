"""Insert a row unless it is there already, on both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from watchstep_services.db.models import Base


def insert_missing(session: Session, model: type[Base], values: dict[str, Any]) -> bool:
    """Insert one row; False where a unique key is taken, which is left as it is."""
    insert: Any = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    table = model.__table__
    statement = insert(table).values(values).on_conflict_do_nothing().returning(*table.primary_key)
    return session.execute(statement).first() is not None
