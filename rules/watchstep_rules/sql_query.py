"""A guarded query over the rows of some steps, again and again: DuckDB over Arrow, bounded in memory, time and rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from watchstep.block import STAGES, Block
from watchstep.errors import RuleError
from watchstep.reading.columns import COUNTED, Columns
from watchstep.reading.sql_tables import catalogue_table, statistics_batch, statistics_schema
from watchstep.segment_checks import PROBE
from watchstep.tensors import LOSSES, MODES, TensorInfo
from watchstep_rules.sql_guard import Guarded, first_line, guarded, locked_database

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10_000
"""Most rows that a query may give for one step."""

RESULT = ("tensor", "worker", "mode", "step", "value", "threshold", "message")
"""The columns that a query may give; ``tensor`` is the one that it must."""

_ALWAYS = frozenset(("step", "mode", "worker", "tensor", "mean"))
_WORDS = ("tensor", "mode", "message")
_NUMBER = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
           "UHUGEINT", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN")  # fmt: skip
_WHOLE = ("worker", "step")


@dataclass(frozen=True)
class Limits:
    """What one query may take, for one step: memory in MiB, and seconds."""

    memory_mb: int
    seconds: float


@lru_cache(maxsize=256)
def checked(query: str) -> tuple[str, ...]:
    """Bind a query to empty tables, and run it over them.

    Returns:
        The names of the columns that it gives.

    Raises:
        ValueError: it may not be run, has an error, or gives columns that make no finding; the message says which.
    """
    with bounded(query, Block.empty(), Limits(64, 1.0)) as bound:
        names = bound.columns()
        try:
            bound.run(0, 0, 0)
        except RuleError as error:
            raise ValueError(error.what.removeprefix("SQL at step 0: ")) from None
        return names


@contextmanager
def bounded(query: str, rows: Block, limits: Limits) -> Iterator[Bound]:
    """A query over some rows, in a database that lives as long as the ``with`` block.

    Args:
        query: its text.
        rows: steps ascending.
        limits: for each step.

    Raises:
        ValueError: the query may not be run.
    """
    try:
        held = guarded(query)
        import duckdb
    except ImportError:
        raise ValueError("duckdb is not installed; install it with: pip install 'watchstep[sql]'") from None
    connection = locked_database(duckdb, limits.memory_mb)
    try:
        table = rows_as_table(rows, held)
        connection.register("statistics", table)
        if held.tables & {"tensors", "losses"}:
            _register_tensors(connection, rows.catalogue)
        connection.execute("SET lock_configuration = true")
        yield Bound(connection, held, table, limits)
    finally:
        connection.close()


class Bound:
    """A query with its tables."""

    def __init__(self, connection: Any, query: Guarded, table: pa.Table, limits: Limits) -> None:
        self._connection = connection
        self._text = f"SELECT * FROM (\n{query.text}\n) LIMIT {MAX_ROWS + 1}"  # noqa: S608 - guarded
        self._table = table
        self._limits = limits

    def columns(self) -> tuple[str, ...]:
        """The columns that the query gives; nothing is run.

        Raises:
            ValueError: it does not fit the tables, or gives columns that make no finding.
        """
        import duckdb

        try:
            given = self._connection.sql(self._text)
            names, kinds = [str(name).lower() for name in given.columns], [str(kind) for kind in given.types]
        except duckdb.Error as error:
            raise ValueError(first_line(error)) from None
        _check_result(names, kinds)
        return tuple(names)

    def run(self, first: int, end: int, step: int) -> list[dict[str, Any]]:
        """What the query gives over rows first … end - 1, which belong to one judged step and its window.

        Raises:
            RuleError: it failed, or took more than it may.
        """
        import duckdb

        self._connection.register("statistics", self._table.slice(first, end - first))
        with interrupted_after(self._connection, self._limits.seconds):
            try:
                cursor = self._connection.execute(self._text)
                found = (
                    cursor.fetchall()
                )  # the text has a LIMIT; a result that is not read to its end blocks the next
            except duckdb.InterruptException:
                raise _over(step, f"took more than {self._limits.seconds:g} s", "params.seconds") from None
            except duckdb.OutOfMemoryException:
                raise _over(
                    step, f"took more than {self._limits.memory_mb} MiB", "params.memory_mb"
                ) from None
            except duckdb.Error as error:
                raise RuleError(f"SQL at step {step}: {first_line(error)}", "correct the query") from None
        if len(found) > MAX_ROWS:
            raise RuleError(
                f"SQL at step {step}: gave more than {MAX_ROWS} rows", "let it give one for each tensor"
            )
        names = [str(column[0]).lower() for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in found]


def rows_as_table(rows: Block, query: Guarded) -> pa.Table:
    """The table ``statistics``, with the columns that a query may read."""
    import pyarrow as pa

    schema = statistics_schema(query.probes if query.columns is not None else sorted(rows.probes))
    if query.columns is not None:
        wanted = query.columns | _ALWAYS
        schema = pa.schema([entry for entry in schema if entry.name.lower() in wanted])
    words: dict[str, list[str]] = {
        "mode": list(MODES),
        "stage": list(STAGES),
        "tensor": [info.name for info in rows.catalogue],
    }
    return pa.Table.from_batches([statistics_batch(_columns(rows, query.probes), schema, words)])


def _columns(rows: Block, probes: tuple[str, ...]) -> Columns:
    import numpy as np

    held: Columns = {name: getattr(rows, name) for name in ("step", "mode", "worker", "tensor", "time_ns")}
    held |= dict(vars(rows.places))
    held |= {name: getattr(rows.statistics, name) for name in COUNTED}
    held |= {PROBE + name: np.full(len(rows), np.nan) for name in probes}
    held |= {PROBE + name: column for name, column in rows.probes.items()}
    return held


def _register_tensors(connection: Any, catalogue: tuple[TensorInfo, ...]) -> None:
    """Only tensors of the window are shown: which others are known depends on when rows came."""
    infos = sorted(catalogue, key=lambda info: info.name)
    connection.register("catalogue", catalogue_table(infos))
    connection.execute(
        "CREATE VIEW tensors AS SELECT * FROM catalogue WHERE name IN (SELECT tensor FROM statistics)"
    )
    connection.execute(
        "CREATE VIEW losses AS SELECT step, mode, worker, tensor AS name, mean AS value FROM statistics "  # noqa: S608
        f"WHERE tensor IN (SELECT name FROM catalogue WHERE list_contains(collections, '{LOSSES}'))"
    )


def _check_result(names: list[str], kinds: list[str]) -> None:
    unknown = [name for name in names if name not in RESULT]
    if "tensor" not in names:
        raise ValueError(f"the query gives no column 'tensor'; it may give {', '.join(RESULT)}")
    if unknown or len(set(names)) < len(names):
        odd = unknown[0] if unknown else next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the query gives column {odd[:80]!r}; it may give {', '.join(RESULT)}, each once")
    for name, kind in zip(names, kinds, strict=True):
        if kind in {'"NULL"', "NULL"}:
            continue
        wanted = kind.startswith(("VARCHAR", "ENUM")) if name in _WORDS else kind.startswith(_NUMBER)
        if name in _WHOLE:
            wanted = "INT" in kind and kind.startswith(_NUMBER)
        if not wanted:
            due = "text" if name in _WORDS else "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"the query gives {name!r} as {kind[:80]}; it must be {due}")


def _over(step: int, what: str, param: str) -> RuleError:
    return RuleError(f"SQL at step {step}: {what}", f"make the query or its window smaller, or raise {param}")


@contextmanager
def interrupted_after(connection: Any, seconds: float) -> Iterator[None]:
    """Interrupt a connection's query after some seconds, unless it has ended."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # an interrupt under way must not meet the next query
