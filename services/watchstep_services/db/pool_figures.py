"""Connections of this process to the database, counted as they come and go."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event

from watchstep_services.core.telemetry import metrics


def count_connections(engine: Engine) -> None:
    """Keep ``watchstep_database_connections`` up to date for an engine."""
    opened, used = metrics.CONNECTIONS.labels("open"), metrics.CONNECTIONS.labels("in_use")

    def invalidated(_connection: Any, _record: Any, error: BaseException | None) -> None:
        if error is not None:
            metrics.CONNECTION_FAILURES.inc()

    event.listen(engine, "connect", lambda _connection, _record: opened.inc())
    event.listen(engine, "close", lambda _connection, _record: opened.dec())
    event.listen(engine, "checkout", lambda _connection, _record, _proxy: used.inc())
    event.listen(engine, "checkin", lambda _connection, _record: used.dec())
    event.listen(engine, "invalidate", invalidated)
