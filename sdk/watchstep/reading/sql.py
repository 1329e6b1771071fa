"""SQL over the statistics of a run: the tables, and DuckDB, which requests only the columns of a query and reads nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.block import STAGES
from watchstep.format.segment_checks import PROBE
from watchstep.format.statistics import COUNT_COLUMNS, DERIVED
from watchstep.format.tensors import LOSSES, MODES, TensorInfo
from watchstep.reading.columns import COUNTED, IDENTITY, Columns, Selection, figure_of, needs_of
from watchstep.reading.index import RunIndex

if TYPE_CHECKING:
    import pyarrow as pa


def catalogue_table(infos: Sequence[TensorInfo]) -> pa.Table:
    """Return the table ``tensors``, with one row per tensor."""
    import pyarrow as pa

    words = ("name", "module", "module_type", "role")
    return pa.table(
        {
            **{word: pa.array([getattr(info, word) for info in infos], pa.string()) for word in words},
            "order": pa.array([info.order for info in infos], pa.int64()),
            "shape": pa.array([info.shape for info in infos], pa.list_(pa.int64())),
            "dtype": pa.array([info.dtype for info in infos], pa.string()),
            "collections": pa.array([info.collections for info in infos], pa.list_(pa.string())),
        }
    )


def statistics_schema(probes: Sequence[str]) -> pa.Schema:
    """Return the schema of the table ``statistics``; names of probes have the prefix ``probe.``."""
    import pyarrow as pa

    word, whole, short, real = (
        pa.dictionary(pa.int32(), pa.string()),
        pa.int64(),
        pa.int32(),
        pa.float64(),
    )
    kinds = {"step": whole, "mode": word, "worker": short, "tensor": word, "time_ns": whole}
    kinds |= {"shard_index": short, "shard_count": short, "replica": short, "stage": word}
    kinds |= {name: real if name not in COUNT_COLUMNS else whole for name in COUNTED}
    kinds |= dict.fromkeys(DERIVED, real)
    kinds |= {PROBE + name: real for name in probes}
    return pa.schema(list(kinds.items()))


def statistics_batch(
    columns: Columns, schema: pa.Schema, words: Mapping[str, Sequence[str]]
) -> pa.RecordBatch:
    """Return rows of the table ``statistics``.

    Args:
        columns: the recorded columns that the schema's columns are computed from.
        schema: `statistics_schema`, or some of its columns.
        words: column of words → the words for its indices.
    """
    import pyarrow as pa

    arrays = []
    for entry in schema:
        if entry.name in words:
            indices = pa.array(columns[entry.name].astype(np.int32))
            arrays.append(pa.DictionaryArray.from_arrays(indices, pa.array(words[entry.name], pa.string())))
        elif entry.name in columns and entry.type != pa.float64():
            arrays.append(pa.array(columns[entry.name], entry.type))
        else:
            arrays.append(pa.array(figure_of(columns, entry.name), pa.float64(), from_pandas=True))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def lazy_table(
    schema: pa.Schema, batches: Callable[[pa.Schema, frozenset[str] | None], Iterator[pa.RecordBatch]]
) -> Any:
    """Return an empty Arrow dataset whose scans read the run, so that only what DuckDB requests is fetched.

    Args:
        schema: schema of all columns.
        batches: returns the rows of some columns; the second argument is the requested tensors, None for all.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    class Scan:
        """What DuckDB requests of a scanner: one reader, which DuckDB's own thread pulls."""

        def __init__(self, names: list[str], condition: Any) -> None:
            filtered = [] if condition is None else [n for n in schema.names if _mentions(str(condition), n)]
            self._read = pa.schema([schema.field(name) for name in dict.fromkeys([*names, *filtered])])
            self._names, self._condition = names, condition
            self.projected_schema = pa.schema([schema.field(name) for name in names])

        def to_reader(self) -> pa.RecordBatchReader:
            return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

        def _batches(self) -> Iterator[pa.RecordBatch]:
            for batch in batches(self._read, _tensors_of(self._condition)):
                rows = ds.dataset(pa.Table.from_batches([batch]))
                yield from rows.to_table(
                    columns=self._names, filter=self._condition, use_threads=False
                ).to_batches()

    class Statistics(ds.InMemoryDataset):  # type: ignore[misc]
        # A scanner of Arrow's reads ahead on threads of its own: a query that needs a part of the rows would end while
        # they still request more.
        def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: Any) -> Any:  # noqa: A002
            return Scan([*schema.names] if columns is None else [*columns], filter)

    return Statistics(schema.empty_table())


def register_tables(connection: Any, statistics: Any, catalogue: pa.Table) -> None:
    """Register a run's tables with a connection, and lock its configuration.

    Args:
        connection: connection to an isolated database.
        statistics: the result of `lazy_table`.
        catalogue: the result of `catalogue_table`.
    """
    connection.register("statistics", statistics)
    connection.register("tensors", catalogue)
    connection.execute(
        "CREATE VIEW losses AS SELECT step, mode, worker, tensor AS name, mean AS value FROM statistics "  # noqa: S608
        f"WHERE tensor IN (SELECT name FROM tensors WHERE list_contains(collections, '{LOSSES}'))"
    )
    connection.execute("SET lock_configuration = true")


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def _tensors_of(condition: Any) -> frozenset[str] | None:
    """Return tensors that a condition requests by equality; None for all."""
    import pyarrow.dataset as ds

    if condition is None:
        return None
    name = ds.get_partition_keys(condition).get("tensor")
    return frozenset([name]) if isinstance(name, str) else None


def query(index: RunIndex, text: str) -> pa.Table:
    """Run one SELECT.

    Tables: ``statistics`` (all rows of the default view, with the derived figures and the probes, without
    histograms), ``tensors`` (the catalogue) and ``losses`` (step, mode, worker, name, value).

    Raises:
        ConfigError: DuckDB is not installed, or refuses the query.
        StoreError: the store cannot be read.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError(
            "SQL: duckdb is not installed", "install it with: pip install 'watchstep[sql]'"
        ) from None
    connection = _locked(duckdb)
    scan_errors: list[WatchstepError] = []
    try:
        _register_run(connection, index, scan_errors)
        relation = connection.sql(text)
        if relation is None:
            raise ConfigError("SQL: the text is not a query", "write one SELECT")
        return relation.to_arrow_table()
    except duckdb.Error as error:
        if scan_errors:  # DuckDB reports only the text of an exception in a scan
            raise scan_errors[0] from None
        raise ConfigError(
            f"SQL: {str(error).strip()}",
            "correct the query; the tables are statistics, tensors and losses",
        ) from None
    finally:
        connection.close()


def _locked(duckdb: Any) -> Any:
    """Open an isolated database in memory, which can neither open files nor load extensions."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )
    connection.execute(
        "SET python_enable_replacements = false"
    )  # do not look up tables among Python variables
    return connection


def _register_run(connection: Any, index: RunIndex, scan_errors: list[WatchstepError]) -> None:
    """Register a run's tables with a connection. ``scan_errors`` receives exceptions of scans, because DuckDB reports only their text."""

    def batches(schema: pa.Schema, tensors: frozenset[str] | None) -> Iterator[pa.RecordBatch]:
        words: dict[str, Sequence[str]] = {
            "mode": MODES, "stage": STAGES, "tensor": [info.name for info in index.tensors()],
        }  # fmt: skip
        try:
            for columns in scan_for(index, schema.names, tensors):
                yield statistics_batch(columns, schema, words)
        except WatchstepError as error:
            scan_errors.append(error)
            raise

    statistics = lazy_table(statistics_schema(index.probes()), batches)
    register_tables(connection, statistics, catalogue_table(index.tensors()))


def scan_for(index: RunIndex, names: Sequence[str], tensors: frozenset[str] | None) -> Iterator[Columns]:
    """Yield the recorded columns that columns of the table ``statistics`` are computed from, object by object.

    Args:
        index: index of the run.
        names: columns of the table.
        tensors: only rows of these; None for all.

    Raises:
        ConfigError: a column does not exist.
        StoreError: the store cannot be read.
    """
    probes = index.probes()
    needs: list[str] = []
    for name in names:
        is_identity = name in IDENTITY or name == "shard_index"
        needs.extend((name,) if is_identity else needs_of(name, probes))
    return index.scan(Selection(tuple(dict.fromkeys(needs)), tensors))
