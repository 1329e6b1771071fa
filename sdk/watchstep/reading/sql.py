"""SQL over a run's statistics: DuckDB, which asks for the columns that a query needs, and reaches nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from watchstep.block import STAGES
from watchstep.errors import ConfigError, WatchstepError
from watchstep.reading.columns import IDENTITY, needs_of
from watchstep.reading.index import RunIndex
from watchstep.reading.scan import Want
from watchstep.reading.sql_tables import catalogue_table, statistics_batch, statistics_schema
from watchstep.tensors import LOSSES, MODES

if TYPE_CHECKING:
    import pyarrow as pa


def query(index: RunIndex, text: str) -> pa.Table:
    """Run one SELECT.

    Tables: ``statistics`` (all rows of the default view, with the derived figures and the probes, but for
    histograms), ``tensors`` (the catalogue) and ``losses`` (step, mode, worker, name, value).

    Raises:
        ConfigError: DuckDB is not installed, or refuses the text.
        StoreError: the store cannot be read.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError(
            "SQL: duckdb is not installed", "install it with: pip install 'watchstep[sql]'"
        ) from None
    connection = _locked(duckdb)
    lost: list[WatchstepError] = []
    try:
        register_run(connection, index, lost)
        found = connection.sql(text)
        if found is None:
            raise ConfigError("SQL: the text is no query", "write one SELECT")
        return found.to_arrow_table()
    except duckdb.Error as error:
        if lost:  # DuckDB passes on only the text of what a scan raised
            raise lost[0] from None
        raise ConfigError(
            f"SQL: {str(error).strip()}",
            "correct the query; the tables are statistics, tensors and losses",
        ) from None
    finally:
        connection.close()


def _locked(duckdb: Any) -> Any:
    """A database of its own in memory, which opens no file, loads no extension and keeps it so."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )
    connection.execute("SET python_enable_replacements = false")  # no table is looked for among variables
    return connection


def register_run(connection: Any, index: RunIndex, lost: list[WatchstepError]) -> None:
    """Give a connection a run's tables, and lock its configuration.

    Args:
        connection: to a database of its own that reaches nothing else.
        index: of the run.
        lost: gets what a scan raised, of which DuckDB passes on only the text.
    """
    connection.register("statistics", _lazy(index, lost))
    connection.register("tensors", catalogue_table(index.tensors()))
    connection.execute(
        "CREATE VIEW losses AS SELECT step, mode, worker, tensor AS name, mean AS value FROM statistics "  # noqa: S608
        f"WHERE tensor IN (SELECT name FROM tensors WHERE list_contains(collections, '{LOSSES}'))"
    )
    connection.execute("SET lock_configuration = true")


def _lazy(index: RunIndex, lost: list[WatchstepError]) -> Any:
    """A dataset of no rows to Arrow, whose scans read the run: what DuckDB asks of it is what is fetched."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    schema = statistics_schema(index.probes())

    class Statistics(ds.InMemoryDataset):  # type: ignore[misc]
        def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: Any) -> Any:  # noqa: A002
            names = [*schema.names] if columns is None else [*columns]
            filtered = [] if filter is None else [n for n in schema.names if _mentions(str(filter), n)]
            read = pa.schema([schema.field(name) for name in dict.fromkeys([*names, *filtered])])
            batches = _noting(lost, _batches(index, read, _tensors_of(filter)))
            reader = pa.RecordBatchReader.from_batches(read, batches)
            return ds.Scanner.from_batches(reader, columns=names, filter=filter)

    return Statistics(schema.empty_table())


def _noting(lost: list[WatchstepError], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except WatchstepError as error:
        lost.append(error)
        raise


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def _tensors_of(condition: Any) -> frozenset[str] | None:
    """Tensors that a condition asks for by equality; None for all."""
    import pyarrow.dataset as ds

    if condition is None:
        return None
    name = ds.get_partition_keys(condition).get("tensor")
    return frozenset([name]) if isinstance(name, str) else None


def _batches(index: RunIndex, schema: pa.Schema, tensors: frozenset[str] | None) -> Iterator[pa.RecordBatch]:
    probes = index.probes()
    needs: list[str] = []
    for name in schema.names:
        known = name in IDENTITY or name == "shard_index"
        needs.extend((name,) if known else needs_of(name, probes))
    names = [info.name for info in index.tensors()]
    words: dict[str, list[str]] = {"mode": list(MODES), "stage": list(STAGES), "tensor": names}
    for held in index.scan(Want(tuple(dict.fromkeys(needs)), tensors)):
        yield statistics_batch(held, schema, words)
