"""Inside the child: executes user SQL over rows that the parent sends or that the child reads.

One child serves one request at a time. Each request gets its own database, so no row is visible to the next request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from watchstep.errors import WatchstepError
from watchstep.format.block import STAGES
from watchstep.format.tensors import MODES
from watchstep.reading.sql import catalogue_table, lazy_table, register_tables, statistics_schema
from watchstep_rules.custom.sandbox.confinement import AddressSpace
from watchstep_rules.custom.sandbox.protocol import (
    MAX_FINDINGS,
    pack,
    pack_findings,
    read_blocking,
    table_from_bytes,
    table_to_bytes,
    write_blocking,
)
from watchstep_rules.custom.sql.guard import guarded, locked_database
from watchstep_rules.custom.sql.query import (
    Interrupter,
    OpenQuery,
    QueryError,
    QueryLimits,
    Window,
    errors_of_queries,
)

if TYPE_CHECKING:
    import pyarrow as pa

Form = Literal["json", "arrow"]

_CHECK = QueryLimits(64, 1.0)
_BATCH = 2048
_GROWTH = 256 * 1024 * 1024
"""A child is replaced when its address space has grown by more than this, because allocators keep reserved memory."""

_Answer = tuple[dict[str, Any], bytes]


class SqlServer:
    """Answers three requests: check the query of a rule, run it for some steps, and run a query about a run."""

    def __init__(self, incoming: int, outgoing: int, space: AddressSpace) -> None:
        self._incoming, self._outgoing, self._space = incoming, outgoing, space
        self._interrupter = Interrupter()
        self._warm_up()
        self._base = space.used() or 0

    def load(self, setup: dict[str, Any]) -> None:
        """Do nothing: a child serves any query."""

    def answers(self, request: dict[str, Any], parts: list[bytearray]) -> Iterator[_Answer]:
        """Answer a request of `watchstep_rules.custom.sql.process`."""
        answer: Callable[[dict[str, Any], list[bytearray]], Iterator[_Answer]] = {
            "check": self._checked,
            "judge": self._judged,
            "select": self._selected,
        }[request["ask"]]
        for document, payload in answer(request, parts):
            grown = (self._space.used() or 0) - self._base > _GROWTH
            yield {**document, "retire": grown}, payload

    def _checked(self, request: dict[str, Any], _parts: list[bytearray]) -> Iterator[_Answer]:
        try:
            allowed = guarded(request["query"])
            schema = statistics_schema(allowed.probes)
            open_query = OpenQuery(request["query"], schema.empty_table(), catalogue_table([]), _CHECK)
            try:
                columns = open_query.columns()
                open_query.run(self._interrupter, 0, 0)
            finally:
                open_query.close()
        except (ValueError, QueryError) as error:
            yield {"refused": str(error)}, b""
        except MemoryError:
            yield {"refused": f"checking it took more than {_CHECK.memory_mb} MiB"}, b""
        else:
            reads = None if allowed.columns is None else sorted(allowed.columns)
            yield {
                "gives": columns, "tables": sorted(allowed.tables), "reads": reads, "probes": allowed.probes,
            }, b""  # fmt: skip

    def _judged(self, request: dict[str, Any], parts: list[bytearray]) -> Iterator[_Answer]:
        """Yield one reply for each window, in order."""
        limits = QueryLimits(request["memory_mb"], request["seconds"])
        windows = [Window(*window) for window in request["windows"]]
        table = table_from_bytes(parts[0])
        catalogue = table_from_bytes(parts[1]) if len(parts) > 1 else None
        open_query = OpenQuery(request["query"], table, catalogue, limits)
        try:
            for window in windows:
                yield self._window(open_query, window, limits)
        finally:
            open_query.close()

    def _window(self, open_query: OpenQuery, window: Window, limits: QueryLimits) -> _Answer:
        try:
            payload = pack_findings(open_query.findings(self._interrupter, window))
        except QueryError as error:
            return {"refused": str(error), "over": error.over}, b""
        except MemoryError:
            return {"refused": f"took more than {limits.memory_mb} MiB", "over": "memory"}, b""
        if len(payload) > MAX_FINDINGS:
            text = f"its findings take {len(payload)} bytes, at most {MAX_FINDINGS} are taken"
            return {"refused": text, "over": "size"}, b""
        return {}, payload

    def _selected(self, request: dict[str, Any], parts: list[bytearray]) -> Iterator[_Answer]:
        limits = QueryLimits(request["memory_mb"], request["seconds"])
        try:
            content, more = self._select(request, parts, limits)
        except ValueError as error:
            yield {"refused": str(error), "over": ""}, b""
        except QueryError as error:
            yield {"refused": str(error), "over": error.over}, b""
        except MemoryError:
            yield {"refused": f"took more than {limits.memory_mb} MiB", "over": "memory"}, b""
        else:
            if len(content) > request["bytes"]:
                text = f"its answer has {len(content)} bytes, at most {request['bytes']} are given"
                yield {"refused": text, "over": "size"}, b""
            else:
                yield {"more": more}, content

    def _select(
        self, request: dict[str, Any], parts: list[bytearray], limits: QueryLimits
    ) -> tuple[bytes, bool]:
        import duckdb

        rows = int(request["rows"])
        allowed = guarded(request["query"])
        statement = f"SELECT * FROM (\n{allowed.text}\n) LIMIT {rows + 1}"  # noqa: S608 - guarded
        schema, catalogue = statistics_schema(request["probes"]), table_from_bytes(parts[0])
        connection = locked_database(duckdb, limits.memory_mb)
        try:
            with errors_of_queries(limits):
                statistics = lazy_table(schema, self._batches(catalogue["name"].to_pylist()))
                register_tables(connection, statistics, catalogue)
                with self._interrupter.after(connection, limits.seconds):
                    table = connection.sql(statement).to_arrow_table(_BATCH)
        finally:
            connection.close()
        more = table.num_rows > rows
        table = table.slice(0, rows)
        _check_size(table, request["bytes"])
        result_format: Form = request["form"]
        return (table_to_bytes(table) if result_format == "arrow" else as_json(table, more=more)), more

    def _batches(
        self, names: Sequence[str]
    ) -> Callable[[pa.Schema, frozenset[str] | None], Iterator[pa.RecordBatch]]:
        """Return a function that requests rows of the run from the parent. Words are sent as indices."""
        words: dict[str, Sequence[str]] = {"mode": MODES, "stage": STAGES, "tensor": names}
        numbers = count()

        def batches(schema: pa.Schema, tensors: frozenset[str] | None) -> Iterator[pa.RecordBatch]:
            scan = next(numbers)
            tensor_names = None if tensors is None else sorted(tensors)
            self._write({"scan": scan, "columns": schema.names, "tensors": tensor_names})
            while True:
                self._write({"next": scan})
                document, parts = read_blocking(self._incoming)
                if document.get("failed"):
                    raise WatchstepError("the run cannot be read", "see the service's answer")
                if not parts:
                    return
                for batch in table_from_bytes(parts[0]).to_batches():
                    yield _with_words(batch, schema, words)

        return batches

    def _write(self, document: dict[str, Any]) -> None:
        write_blocking(self._outgoing, pack(document))

    def _warm_up(self) -> None:
        """Load and allocate everything that is loaded or allocated lazily."""
        import duckdb

        schema = statistics_schema(())
        lazy = lazy_table(schema, lambda read, _: iter(read.empty_table().to_batches()))
        query = "SELECT tensor, avg(mean) FROM statistics WHERE tensor = 'x' GROUP BY tensor"
        guarded(query)
        connection = locked_database(duckdb)
        try:
            register_tables(connection, lazy, catalogue_table([]))
            with self._interrupter.after(connection, 60):
                table = connection.sql(query).to_arrow_table(_BATCH)
        finally:
            connection.close()
        as_json(table, more=False)
        table_from_bytes(table_to_bytes(table))


def _with_words(batch: pa.RecordBatch, schema: pa.Schema, words: dict[str, Sequence[str]]) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [
        pa.DictionaryArray.from_arrays(batch[entry.name], pa.array(words[entry.name], pa.string()))
        if entry.name in words
        else batch[entry.name]
        for entry in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_size(table: pa.Table, limit: int) -> None:
    """Refuse a large table before it is serialized. Its buffers may be larger than the slice."""
    cells = table.num_rows * table.num_columns
    if cells > limit or table.nbytes > limit:
        raise QueryError(
            f"its answer has {cells} cells and {table.nbytes} bytes, at most {limit} are given", "size"
        )


def as_json(table: pa.Table, *, more: bool) -> bytes:
    """Return a table as the JSON of the API: ``columns`` (name and Arrow type), ``rows`` and ``more``.

    Raises:
        QueryError: a value cannot be represented in JSON; the message names the column.
    """
    columns = [{"name": entry.name, "type": str(entry.type)} for entry in table.schema]
    values = [_values(entry.name, column) for entry, column in zip(table.schema, table.columns, strict=True)]
    rows = [list(row) for row in zip(*values, strict=True)]
    return json.dumps({"columns": columns, "rows": rows, "more": more}, allow_nan=False).encode()


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    try:
        return [_plain(value) for value in column.cast(_in_utc(column.type)).to_pylist()]
    except (ValueError, OverflowError, ArithmeticError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise QueryError(
            f"column {name[:80]!r} of type {str(column.type)[:80]} has a value that JSON does not hold ({reason}): "
            "cast it to text, or ask for Arrow"
        ) from None


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """Replace each time zone of a type by a fixed offset: time zone names need files that the child may not read."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "+00:00")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([entry.with_type(_in_utc(entry.type)) for entry in kind])
    return kind


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else _plain(float(value))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
