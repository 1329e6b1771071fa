"""The database's own clock, so that several workers on several machines agree on the time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Dialect, Engine, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

_REPLACED = "watchstep_clock"


class now_ns(FunctionElement[int]):  # noqa: N801 - reads as the SQL function that it is
    """Nanoseconds since the epoch by the database's clock, at the statement and not at the transaction's start.

    SQLite counts in milliseconds, PostgreSQL in microseconds.
    """

    type = BigInteger()
    inherit_cache = True


@compiles(now_ns, "sqlite")
def _sqlite(_element: now_ns, compiler: Any, **_options: Any) -> str:
    own = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000000)"
    return str(getattr(compiler.dialect, _REPLACED, own))


@compiles(now_ns, "postgresql")
def _postgresql(_element: now_ns, compiler: Any, **_options: Any) -> str:
    own = "(CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT) * 1000)"
    return str(getattr(compiler.dialect, _REPLACED, own))


def replace_clock(engine: Engine, expression: str) -> None:
    """Have an engine that has run nothing yet take the time from a SQL expression: tests that move a clock themselves do.

    Args:
        engine: whose statements.
        expression: SQL that gives nanoseconds since the epoch, as ``(SELECT now_ns FROM test_clock)``.
    """
    setattr(engine.dialect, _REPLACED, expression)
    engine.clear_compiled_cache()


def clock_expression(dialect: Dialect) -> str:
    """The time in an engine's SQL, for statements that are written as text."""
    return str(now_ns().compile(dialect=dialect))


def read_clock(session: Session) -> int:
    """The time now, in nanoseconds since the epoch."""
    return int(session.execute(select(now_ns())).scalar_one())
