"""Inside the child: executes a guarded query over the rows of some steps, with bounded memory, time and rows.

The text is the user's, so it never runs in the service's own process; see `watchstep_rules.custom.sql.process`. DuckDB's limits apply
first: they end a query and leave the process alive. The limit of the address space and the parent's deadline apply where DuckDB does
not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from watchstep.format.tensors import LOSSES
from watchstep_rules.custom.sandbox.protocol import MAX_MESSAGE, FoundRow
from watchstep_rules.custom.sql.guard import AllowedQuery, first_line, guarded, locked_database

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10_000
"""Maximum number of result rows for one step."""

RESULT = ("tensor", "worker", "mode", "step", "value", "threshold", "message")
"""The columns that a query may return; ``tensor`` is required."""

_WORDS = ("tensor", "mode", "message")
_NUMBER = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
           "UHUGEINT", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN")  # fmt: skip
_WHOLE = ("worker", "step")
_TOO_LARGE = "Requested allocation size"
"""DuckDB reports an impossibly large allocation as an internal error."""


class QueryError(Exception):
    """The query failed; the message gives the reason.

    Args:
        what: message, in one line.
        over: the exceeded limit: ``memory``, ``seconds`` or ``size`` (of the result); empty for an error in the query.
    """

    def __init__(self, what: str, over: str = "") -> None:
        super().__init__(what)
        self.over = over


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query for one step: memory in MiB, and time in seconds."""

    memory_mb: int
    seconds: float


@dataclass(frozen=True)
class Window:
    """Rows of a table that belong to an evaluated step and the steps before it.

    Attributes:
        step: the evaluated step.
        first: index of the first row.
        begin: index of the first row of the step.
        end: index after the last row of the step.
    """

    step: int
    first: int
    begin: int
    end: int


class Interrupter:
    """Interrupts a connection's query after a timeout.

    Its thread starts once, while threads may still be started.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connection: Any = None
        self._deadline = 0.0
        threading.Thread(target=self._serve, daemon=True).start()

    @contextmanager
    def after(self, connection: Any, seconds: float) -> Iterator[None]:
        """Interrupt the connection's query if the block takes longer than ``seconds``."""
        with self._changed:
            self._connection, self._deadline = connection, time.monotonic() + seconds
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:  # a pending interrupt must not hit the next query
                self._connection = None

    def _serve(self) -> None:
        with self._changed:
            while True:
                remaining = self._deadline - time.monotonic()
                if self._connection is None:
                    self._changed.wait()
                elif remaining > 0:
                    self._changed.wait(remaining)
                else:
                    self._connection.interrupt()
                    self._connection = None


@contextmanager
def errors_of_queries(limits: QueryLimits) -> Iterator[None]:
    """Convert errors of DuckDB to `QueryError`.

    Args:
        limits: limits that the message names.
    """
    import duckdb

    try:
        yield
    except duckdb.InterruptException:
        raise QueryError(f"took more than {limits.seconds:g} s", "seconds") from None
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryError(f"took more than {limits.memory_mb} MiB", "memory") from None
    except duckdb.Error as error:
        if isinstance(error, duckdb.InternalException) and _TOO_LARGE in str(error):
            raise QueryError(f"took more than {limits.memory_mb} MiB", "memory") from None
        raise QueryError(first_line(error)) from None


class OpenQuery:
    """A query with its tables, in its own database. Close it after use.

    Args:
        query: text of the query.
        table: ``statistics`` with the columns that the query may read; steps ascending.
        catalogue: ``tensors``; None if the query reads neither ``tensors`` nor ``losses``.
        limits: limits for each step.

    Raises:
        ValueError: the query is not allowed.
    """

    def __init__(self, query: str, table: pa.Table, catalogue: pa.Table | None, limits: QueryLimits) -> None:
        import duckdb

        self.query: AllowedQuery = guarded(query)
        self._text = f"SELECT * FROM (\n{self.query.text}\n) LIMIT {MAX_ROWS + 1}"  # noqa: S608 - guarded
        self._table = table
        self._limits = limits
        self._connection = locked_database(duckdb, limits.memory_mb)
        self._connection.register("statistics", table)
        if catalogue is not None:
            _register_tensors(self._connection, catalogue)
        self._connection.execute("SET lock_configuration = true")

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def columns(self) -> tuple[str, ...]:
        """Return the result columns, without running the query.

        Raises:
            ValueError: the query does not fit the tables, or its result columns form no finding.
        """
        try:
            with errors_of_queries(self._limits):
                relation = self._connection.sql(self._text)
                names, kinds = (
                    [str(name).lower() for name in relation.columns],
                    [str(kind) for kind in relation.types],
                )
        except QueryError as error:
            raise ValueError(str(error)) from None
        _check_result(names, kinds)
        return tuple(names)

    def run(self, interrupter: Interrupter, first: int, end: int) -> list[dict[str, Any]]:
        """Run the query over rows first … end - 1, which belong to an evaluated step and its window.

        Raises:
            QueryError: the query failed or exceeded a limit.
        """
        self._connection.register("statistics", self._table.slice(first, end - first))
        with errors_of_queries(self._limits), interrupter.after(self._connection, self._limits.seconds):
            cursor = self._connection.execute(self._text)
            rows = cursor.fetchall()  # the text has a LIMIT; a partly read result blocks the next query
        if len(rows) > MAX_ROWS:
            raise QueryError(f"gave more than {MAX_ROWS} rows; let it give one for each tensor", "size")
        names = [str(column[0]).lower() for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def findings(self, interrupter: Interrupter, window: Window) -> list[FoundRow]:
        """Return one finding for each row of the step that the query names, in the order of the rows.

        Raises:
            QueryError: the query failed or exceeded a limit.
        """
        result_rows = self.run(interrupter, window.first, window.end)
        if not result_rows:
            return []
        at_step = self._table.slice(window.begin, window.end - window.begin)
        names, workers, modes = (at_step[name].to_pylist() for name in ("tensor", "worker", "mode"))
        rows_of_tensor: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows_of_tensor.setdefault(name, []).append(row)
        entries: dict[int, dict[str, Any]] = {}
        for entry in result_rows:
            if entry.get("step", window.step) != window.step:
                continue
            for row in rows_of_tensor.get(entry["tensor"], []):
                if entry.get("worker") not in {None, workers[row]}:
                    continue
                if entry.get("mode") not in {None, modes[row]}:
                    continue
                entries.setdefault(row, entry)
                break
        return [_found(window.begin + row, names[row], entries[row]) for row in sorted(entries)]


def _found(row: int, name: str, entry: dict[str, Any]) -> FoundRow:
    try:
        value, threshold = _number(entry.get("value", 0.0)), _number(entry.get("threshold", 0.0))
    except OverflowError as error:
        raise QueryError(f"gave a number that no float holds ({error})") from None
    message = str(entry.get("message") or "")[:MAX_MESSAGE]
    if not message:
        figures = [f"{word} {_number(entry[word]):.3g}" for word in ("value", "threshold") if word in entry]
        message = f"the query gives {name}" + (f": {', '.join(figures)}" if figures else "")
    return FoundRow(row, value, threshold, message)


def _number(value: Any) -> float:
    """Replace NULL and NaN by infinity, which can be compared."""
    number = float("nan") if value is None else float(value)
    return float("inf") if number != number else number  # noqa: PLR0124 - NaN


def _register_tensors(connection: Any, catalogue: pa.Table) -> None:
    """Create the views. They contain only tensors of the window, because others depend on when rows arrived."""
    connection.register("catalogue", catalogue)
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
        invalid = unknown[0] if unknown else next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"the query gives column {invalid[:80]!r}; it may give {', '.join(RESULT)}, each once"
        )
    for name, kind in zip(names, kinds, strict=True):
        if kind in {'"NULL"', "NULL"}:
            continue
        is_valid = kind.startswith(("VARCHAR", "ENUM")) if name in _WORDS else kind.startswith(_NUMBER)
        if name in _WHOLE:
            is_valid = "INT" in kind and kind.startswith(_NUMBER)
        if not is_valid:
            expected = "text" if name in _WORDS else "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"the query gives {name!r} as {kind[:80]}; it must be {expected}")
