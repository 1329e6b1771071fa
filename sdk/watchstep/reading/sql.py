"""SQL over a run's statistics: DuckDB, which asks for the columns that a query needs, and reaches nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from watchstep.block import STAGES
from watchstep.errors import ConfigError, WatchstepError
from watchstep.reading.columns import IDENTITY, Columns, needs_of
from watchstep.reading.index import RunIndex
from watchstep.reading.scan import Want
from watchstep.reading.sql_tables import (
    catalogue_table,
    lazy_table,
    register_tables,
    statistics_batch,
    statistics_schema,
)
from watchstep.tensors import MODES

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
        _register_run(connection, index, lost)
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


def _register_run(connection: Any, index: RunIndex, lost: list[WatchstepError]) -> None:
    """Give a connection a run's tables; ``lost`` gets what a scan raised, of which DuckDB passes on only the text."""

    def batches(schema: pa.Schema, tensors: frozenset[str] | None) -> Iterator[pa.RecordBatch]:
        words: dict[str, Sequence[str]] = {
            "mode": MODES, "stage": STAGES, "tensor": [info.name for info in index.tensors()],
        }  # fmt: skip
        try:
            for held in scan_for(index, schema.names, tensors):
                yield statistics_batch(held, schema, words)
        except WatchstepError as error:
            lost.append(error)
            raise

    statistics = lazy_table(statistics_schema(index.probes()), batches)
    register_tables(connection, statistics, catalogue_table(index.tensors()))


def scan_for(index: RunIndex, names: Sequence[str], tensors: frozenset[str] | None) -> Iterator[Columns]:
    """The recorded columns that columns of the table ``statistics`` follow from, object by object.

    Args:
        index: of the run.
        names: of the table's columns.
        tensors: only rows of these; None for all.

    Raises:
        ConfigError: there is no such column.
        StoreError: the store cannot be read.
    """
    probes = index.probes()
    needs: list[str] = []
    for name in names:
        known = name in IDENTITY or name == "shard_index"
        needs.extend((name,) if known else needs_of(name, probes))
    return index.scan(Want(tuple(dict.fromkeys(needs)), tensors))
