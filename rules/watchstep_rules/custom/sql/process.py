"""SQL in a child process: checks and executes the queries of rules, and answers queries about a run.

A short query can take any amount of memory and time, and DuckDB's own limits do not cover everything: texts and plans are not counted.
Three limits apply, one after the other:

1. DuckDB's: memory, one thread, an interrupt after some seconds, a row limit. They end the query.
2. The child's address space (``RLIMIT_AS``). An allocation beyond it fails and ends the query or the child.
3. The parent's deadline, some seconds after the interrupt. The child is killed.

The children are shared with Python rules and have the same confinement (`watchstep_rules.custom.sandbox`); any child serves any query.
The parent never parses results: findings have a typed binary form, responses are passed on as bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from watchstep.errors import ConfigError, RuleError, WatchstepError
from watchstep.format.block import STAGES, Block
from watchstep.format.segment_checks import PROBE
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading.budget import OverBudgetError
from watchstep.reading.columns import COUNTED, Columns
from watchstep.reading.sql import catalogue_table, statistics_batch, statistics_schema
from watchstep_rules.custom.sandbox.confinement import Isolation
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sandbox.process import Child, DeadError, StartError
from watchstep_rules.custom.sandbox.program import out_of_time, rule_time_charged, rule_time_left
from watchstep_rules.custom.sandbox.protocol import (
    MAX_FINDINGS,
    SHORT,
    FoundRow,
    FrameLimits,
    Parts,
    Reply,
    kept,
    table_to_bytes,
    unpack_findings,
)
from watchstep_rules.custom.sql.query import QueryLimits, Window

if TYPE_CHECKING:
    import pyarrow as pa

OLDEST = (1, 5)
"""The first DuckDB version that parses nested queries in linear time: 1.4 takes gigabytes for ten nested ``WITH`` queries.
Earlier versions do not count texts against the memory limit."""

MAX_ANSWER = 32 * 1024 * 1024
"""Maximum size of the result of a query about a run, in bytes of JSON or Arrow."""

_CHECK_SECONDS = 15.0
_SEND_SECONDS = 30.0
_GRACE_SECONDS = 5.0
"""Time between the interrupt of a query and the kill of its process, which may be busy with one block."""

_LEAST_ROOM = 256
_MOST_CHECKED = 1024
_MOST_SCANS = 1000
_BATCH = 65_536
_MEGABYTE = 1024 * 1024
_ALWAYS = frozenset(("step", "mode", "worker", "tensor", "mean"))
_CORRECT = "correct the query; the tables are statistics, tensors and losses"


@dataclass(frozen=True)
class SqlProgram:
    """The program of a child that runs SQL. Children of one size serve any query.

    Attributes:
        memory_mb: memory that it may use in addition to its libraries, in MiB.
    """

    memory_mb: int

    @classmethod
    def for_query(cls, memory_mb: int, parts: Parts = ()) -> SqlProgram:
        """Return a program with memory for a query, for allocations that DuckDB does not count, and for sent data; sizes are powers of 2."""
        sent = 2 * sum(map(len, parts)) // _MEGABYTE
        return cls(1 << (memory_mb + _LEAST_ROOM + sent - 1).bit_length())

    @property
    def kind(self) -> str:
        """See `watchstep_rules.custom.sandbox.process.Runnable`."""
        return "sql"

    @property
    def called(self) -> str:
        """Name of the program in errors."""
        return "SQL"

    def setup(self) -> dict[str, Any]:
        """Return an empty document: requests contain the queries."""
        return {}

    def refusal(self, isolation: Isolation) -> str:
        """Return an empty text: SQL runs under any isolation, because queries are restricted and the database has no external access."""
        return ""


@dataclass(frozen=True)
class CheckedQuery:
    """A query of a rule that passed the checks.

    Attributes:
        gives: names of its result columns.
        tables: tables that it reads, of ``statistics``, ``tensors`` and ``losses``.
        reads: names of the columns that it may read, in lower case; None for all.
        probes: names of the probes among these columns, without the prefix.
    """

    gives: tuple[str, ...]
    tables: frozenset[str]
    reads: frozenset[str] | None
    probes: tuple[str, ...]


@lru_cache(maxsize=_MOST_CHECKED)
def checked(query: str) -> CheckedQuery:
    """Check a query against the allowed syntax, bind it to empty tables, and run it over them.

    Raises:
        ValueError: the query is not allowed, has an error, or has result columns that form no finding; the message gives the reason.
        StartError: no child can be started now.
    """
    _check_installed()
    culprit = ("check", query)
    try:
        with POOL.child(SqlProgram.for_query(0), "checks", culprit) as child:
            document = child.request({"ask": "check", "query": query}, (), _CHECK_SECONDS).document
    except StartError:
        raise
    except RuleError as error:
        raise ValueError(error.what) from None
    match document:
        case {"refused": str(reason)}:
            raise ValueError(kept(reason[:500]))
        case {"gives": [*gives], "tables": [*tables], "reads": reads, "probes": [*probes]}:
            names = None if reads is None else frozenset(map(str, reads))
            return CheckedQuery(tuple(gives), frozenset(tables), names, tuple(map(str, probes)))
    raise ValueError("the query could not be checked: its process sent what is not an answer")


def judged(
    query: str, rows: Block, windows: Sequence[Window], limits: QueryLimits
) -> list[list[FoundRow] | RuleError]:
    """Run a rule's query for each evaluated step; return the findings of each step, or its error.

    If a query ends its child, that step fails, and the next steps get another child after a growing pause.

    Args:
        query: text of the query.
        rows: rows with ascending steps.
        windows: windows of the evaluated steps.
        limits: limits for each step.

    Raises:
        RuleError: no child can be started, or the query is not allowed.
    """
    POOL.check_memory("SQL", limits.memory_mb)
    try:
        checked_query = checked(query)
    except ValueError as error:
        raise RuleError(f"SQL: {error}", "correct the query") from None
    parts = [table_to_bytes(rows_as_table(rows, checked_query))]
    if checked_query.tables & {"tensors", "losses"}:
        parts.append(table_to_bytes(catalogue_table(sorted(rows.catalogue, key=lambda info: info.name))))
    program = SqlProgram.for_query(limits.memory_mb, parts)
    outcomes: list[list[FoundRow] | RuleError] = []
    while len(outcomes) < len(windows):
        if rule_time_left() <= 0:
            steps = windows[len(outcomes) :]
            return outcomes + [out_of_time(f"SQL at step {window.step}") for window in steps]
        try:
            with rule_time_charged(), POOL.child(program, culprit=("judge", query)) as child:
                for outcome in _judge(child, query, parts, windows[len(outcomes) :], limits, len(rows)):
                    outcomes.append(outcome)  # noqa: PERF402 - keep outcomes from before a death
        except StartError:
            raise
        except DeadError as error:
            step = windows[len(outcomes)].step
            outcomes.append(RuleError(f"SQL at step {step}: {error.what.removeprefix('SQL: ')}", error.hint))
    return outcomes


def _judge(
    child: Child, query: str, parts: Parts, windows: Sequence[Window], limits: QueryLimits, rows: int
) -> Iterator[list[FoundRow] | RuleError]:
    request = {
        "ask": "judge", "query": query, "memory_mb": limits.memory_mb, "seconds": limits.seconds,
        "windows": [[window.step, window.first, window.begin, window.end] for window in windows],
    }  # fmt: skip
    child.send(request, parts, time.monotonic() + _SEND_SECONDS, _SEND_SECONDS)
    longest = limits.seconds + _GRACE_SECONDS
    for window in windows:
        remaining = min(longest, rule_time_left())
        if remaining <= 0:
            child.close()
            error = out_of_time("SQL")
            raise DeadError(error.what, error.hint)
        reply = child.receive(
            time.monotonic() + remaining, remaining, FrameLimits(SHORT.document, MAX_FINDINGS)
        )
        match reply.document:
            case {"refused": str(reason), "over": str(over)}:
                yield _failed(window.step, kept(reason[:500]), over)
            case _:
                yield _found(child, reply, window, rows)


def _found(child: Child, reply: Reply, window: Window, rows: int) -> list[FoundRow]:
    try:
        findings = unpack_findings(reply.payload, rows)
    except ValueError as error:
        raise _odd(child, str(error)) from None
    if any(not window.begin <= entry.row < window.end for entry in findings):
        raise _odd(child, f"a finding is about a row of another step than {window.step}")
    return findings


def _odd(child: Child, reason: str) -> DeadError:
    """End a child that violates the protocol; return the error."""
    child.close()
    return DeadError(f"SQL: {reason}", "report it, with the query")


def _failed(step: int, reason: str, over: str) -> RuleError:
    param = {"memory": "params.memory_mb", "seconds": "params.seconds"}.get(over)
    hint = f"make the query or its window smaller, or raise {param}" if param else "correct the query"
    return RuleError(f"SQL at step {step}: {reason}", hint)


def rows_as_table(rows: Block, query: CheckedQuery) -> pa.Table:
    """Return the table ``statistics`` with the columns that a query may read."""
    import pyarrow as pa

    schema = statistics_schema(query.probes if query.reads is not None else sorted(rows.probes))
    if query.reads is not None:
        wanted = query.reads | _ALWAYS
        schema = pa.schema([entry for entry in schema if entry.name.lower() in wanted])
    words: dict[str, list[str]] = {
        "mode": list(MODES),
        "stage": list(STAGES),
        "tensor": [info.name for info in rows.catalogue],
    }
    return pa.Table.from_batches([statistics_batch(_columns(rows, query.probes), schema, words)])


def _columns(rows: Block, probes: tuple[str, ...]) -> Columns:
    import numpy as np

    columns: Columns = {name: getattr(rows, name) for name in ("step", "mode", "worker", "tensor", "time_ns")}
    columns |= dict(vars(rows.places))
    columns |= {name: getattr(rows.statistics, name) for name in COUNTED}
    columns |= {PROBE + name: np.full(len(rows), np.nan) for name in probes}
    columns |= {PROBE + name: column for name, column in rows.probes.items()}
    return columns


@dataclass(frozen=True)
class QuerySource:
    """The run that a query reads.

    Attributes:
        tensors: catalogue of the run.
        probes: names of its probes.
        scan: maps columns of ``statistics`` and names of tensors (None for all) to the recorded columns, object by object.
            A `WatchstepError` that it raises ends the query.
    """

    tensors: Sequence[TensorInfo]
    probes: Sequence[str]
    scan: Callable[[Sequence[str], frozenset[str] | None], Iterator[Columns]]


@dataclass(frozen=True)
class Question:
    """A query about a run.

    Attributes:
        query: one SELECT; see `watchstep_rules.custom.sql.guard`.
        rows: maximum number of result rows.
        form: ``json`` or ``arrow``.
        limits: limits of memory and time.
    """

    query: str
    rows: int
    form: Literal["json", "arrow"]
    limits: QueryLimits


@dataclass(frozen=True)
class QueryResult:
    """The result of a query.

    Attributes:
        content: an Arrow stream, or JSON with ``columns``, ``rows`` and ``more``.
        more: whether there were more rows.
    """

    content: bytearray
    more: bool


def select(question: Question, source: QuerySource) -> QueryResult:
    """Run a query about a run.

    Raises:
        ConfigError: the query is not allowed, has an error, or has a value that cannot be serialized.
        OverBudgetError: the query takes too much memory or time, or its result is too large.
        BusyError, StartError: no child is free, or none can be started.
        WatchstepError: raised by the source's scan.
    """
    _check_installed_for_query()
    catalogue = table_to_bytes(catalogue_table(source.tensors))
    program = SqlProgram.for_query(question.limits.memory_mb, (catalogue,))
    try:
        with POOL.child(program, "queries", object()) as child:
            return _Selection(child, question, source).answer(catalogue)
    except StartError:
        raise
    except DeadError as error:
        raise OverBudgetError(
            error.what, "let the query read fewer tensors or steps, aggregate, or make shorter texts"
        ) from None


class _Selection:
    """An exchange with a child, which requests rows as its query needs them and sends the result at the end."""

    def __init__(self, child: Child, question: Question, source: QuerySource) -> None:
        self._child, self._question, self._source = child, question, source
        self._longest = question.limits.seconds + _GRACE_SECONDS
        self._deadline = time.monotonic() + self._longest
        self._scans: dict[int, Iterator[pa.RecordBatch]] = {}
        self._lost: WatchstepError | None = None

    def answer(self, catalogue: bytes) -> QueryResult:
        question = self._question
        request = {
            "ask": "select", "query": question.query, "rows": question.rows, "form": question.form,
            "memory_mb": question.limits.memory_mb, "seconds": question.limits.seconds,
            "probes": list(self._source.probes), "bytes": MAX_ANSWER,
        }  # fmt: skip
        self._send(request, (catalogue,))
        while True:
            reply = self._child.receive(
                self._deadline, self._longest, FrameLimits(SHORT.document, MAX_ANSWER)
            )
            match reply.document:
                case {"scan": int(number), "columns": [*columns], "tensors": tensors}:
                    self._begin(number, columns, tensors)
                case {"next": int(number)}:
                    self._next(number)
                case {"refused": str(reason), "over": str(over)}:
                    raise self._lost or _refused(kept(reason[:500]), over)
                case {"more": bool(more)}:
                    if self._lost is not None:
                        raise self._lost
                    return QueryResult(reply.payload, more)
                case _:
                    raise _odd(self._child, "its process sent what is not an answer")

    def _send(self, document: dict[str, Any], parts: Parts = ()) -> None:
        self._child.send(document, parts, self._deadline, self._longest)

    def _begin(self, number: int, columns: list[Any], tensors: Any) -> None:
        column_names = {entry.name for entry in statistics_schema(self._source.probes)}
        if number in self._scans or len(self._scans) >= _MOST_SCANS or not column_names.issuperset(columns):
            raise _odd(self._child, "its process asked for rows that there are none of")
        tensor_names = None if tensors is None else frozenset(map(str, tensors))
        self._scans[number] = _batches(self._source, columns, tensor_names)

    def _next(self, number: int) -> None:
        try:
            batch = None if self._lost else next(self._scans.get(number, iter(())), None)
        except WatchstepError as error:
            self._lost = error
        if self._lost is not None:
            self._send({"failed": True})
        else:
            self._send({}, () if batch is None else (table_to_bytes(batch),))


def _batches(
    source: QuerySource, columns: Sequence[str], tensors: frozenset[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of up to `_BATCH`. Words are sent as indices; the child has the words."""
    import pyarrow as pa

    full_schema = statistics_schema(source.probes)
    kinds = {
        name: pa.int32() if pa.types.is_dictionary(full_schema.field(name).type) else None for name in columns
    }
    schema = pa.schema([(name, kinds[name] or full_schema.field(name).type) for name in columns])
    for columns_of_object in source.scan(columns, tensors):
        batch = statistics_batch(columns_of_object, schema, {})
        for start in range(0, batch.num_rows, _BATCH):
            yield batch.slice(start, _BATCH)


def _refused(reason: str, over: str) -> WatchstepError:
    if over:
        return OverBudgetError(f"SQL: the query {reason}", "let it read fewer tensors or steps, or aggregate")
    return ConfigError(f"SQL: {reason}", _CORRECT)


def _check_installed() -> None:
    """Check that a supported version of DuckDB is installed, without loading it.

    Raises:
        ValueError: it is missing or too old.
    """
    try:
        installed = version("duckdb")
    except PackageNotFoundError:
        raise ValueError("duckdb is not installed; install it with: pip install 'watchstep[sql]'") from None
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ValueError(
            f"duckdb is {installed}, at least {needed} is needed: pip install -U 'watchstep[sql]'"
        )


def _check_installed_for_query() -> None:
    try:
        _check_installed()
    except ValueError as error:
        raise ConfigError(f"SQL: {error}", "install the service with 'watchstep[sql]'") from None
