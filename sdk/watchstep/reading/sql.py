"""SQL over the statistics of a run: the tables, and DuckDB, which requests only the columns of a query and reads nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.block import STAGES
from watchstep.format.segment import PROBE
from watchstep.format.statistics import COUNT_COLUMNS, DERIVED
from watchstep.format.tensors import LOSSES, MODES, TensorInfo
from watchstep.reading.columns import COUNTED, IDENTITY, Columns, Want, figure_of, needs_of
from watchstep.reading.index import RunIndex

if TYPE_CHECKING:
    import pyarrow as pa


def catalogue_table(infos: Sequence[TensorInfo]) -> pa.Table:
    """The table ``tensors``: one row each."""
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
    """The columns of the table ``statistics``; a probe's name has the prefix ``probe.`` there."""
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
    """Rows of the table ``statistics``.

    Args:
        columns: the recorded columns that the schema's follow from.
        schema: `statistics_schema`'s, or some of its columns.
        words: column of words → what its indices stand for.
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
    """A dataset of no rows to Arrow, whose scans read the run: what DuckDB asks of it is what is fetched.

    Args:
        schema: of all columns.
        batches: some columns → their rows; the second argument is the tensors that are asked for, None for all.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    class Statistics(ds.InMemoryDataset):  # type: ignore[misc]
        def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: Any) -> Any:  # noqa: A002
            names = [*schema.names] if columns is None else [*columns]
            filtered = [] if filter is None else [n for n in schema.names if _mentions(str(filter), n)]
            read = pa.schema([schema.field(name) for name in dict.fromkeys([*names, *filtered])])
            reader = pa.RecordBatchReader.from_batches(read, batches(read, _tensors_of(filter)))
            return ds.Scanner.from_batches(reader, columns=names, filter=filter)

    return Statistics(schema.empty_table())


def register_tables(connection: Any, statistics: Any, catalogue: pa.Table) -> None:
    """Give a connection a run's tables, and lock its configuration.

    Args:
        connection: to a database of its own that reaches nothing else.
        statistics: what `lazy_table` gave.
        catalogue: what `catalogue_table` gave.
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
    """Tensors that a condition asks for by equality; None for all."""
    import pyarrow.dataset as ds

    if condition is None:
        return None
    name = ds.get_partition_keys(condition).get("tensor")
    return frozenset([name]) if isinstance(name, str) else None


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
        relation = connection.sql(text)
        if relation is None:
            raise ConfigError("SQL: the text is no query", "write one SELECT")
        return relation.to_arrow_table()
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
            for columns in scan_for(index, schema.names, tensors):
                yield statistics_batch(columns, schema, words)
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
        is_identity = name in IDENTITY or name == "shard_index"
        needs.extend((name,) if is_identity else needs_of(name, probes))
    return index.scan(Want(tuple(dict.fromkeys(needs)), tensors))
