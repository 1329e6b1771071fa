"""Insert a row unless it is there already, on both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from watchstep_services.database.models import Base


def insert_missing(session: Session, model: type[Base], values: dict[str, Any]) -> bool:
    """Insert one row; False where a unique key is taken, which is left as it is."""
    statement: Any
    if session.get_bind().dialect.name == "sqlite":
        statement = sqlite.insert(model).values(values).on_conflict_do_nothing()
    else:
        statement = postgresql.insert(model).values(values).on_conflict_do_nothing()
    result: Any = session.execute(statement)
    return bool(result.rowcount == 1)
