"""One SELECT over a run's statistics: guarded as SQL rules are, in a database that reaches nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError, WatchstepError
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.run import Run
from watchstep.reading.sql import register_run
from watchstep_rules.sql_guard import first_line, guarded, locked_database
from watchstep_rules.sql_query import interrupted_after

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 2048


@dataclass(frozen=True)
class Found:
    """What a query gave.

    Attributes:
        table: its rows, at most as many as were asked for.
        more: there were more.
    """

    table: pa.Table
    more: bool


def run_sql(run: Run, text: str, rows: int, budget: ReadBudget, memory_mb: int) -> Found:
    """Run a query.

    Args:
        run: opened with the budget.
        text: one SELECT; see `watchstep_rules.sql_guard`.
        rows: most rows of the answer.
        budget: of seconds.
        memory_mb: what DuckDB may take.

    Raises:
        ConfigError: the query may not be run, or has an error.
        OverBudgetError: it takes too long, or too much memory.
    """
    try:
        held = guarded(text)
        import duckdb
    except ImportError:
        raise ConfigError(
            "SQL: duckdb is not installed", "install the service with 'watchstep[sql]'"
        ) from None
    except ValueError as error:
        raise ConfigError(f"SQL: {error}", "see docs/sql-rules.md for what a query may say") from None
    statement = f"SELECT * FROM (\n{held.text}\n) LIMIT {rows + 1}"  # noqa: S608 - guarded
    return run.index.consistently(lambda: _once(duckdb, run, statement, rows, (budget, memory_mb)))


def _once(duckdb: Any, run: Run, statement: str, rows: int, limits: tuple[ReadBudget, int]) -> Found:
    budget, memory_mb = limits
    connection = locked_database(duckdb, memory_mb)
    lost: list[WatchstepError] = []
    try:
        register_run(connection, run.index, lost)
        with interrupted_after(connection, budget.left_seconds):
            table = connection.sql(statement).to_arrow_table(_BATCH)
    except duckdb.InterruptException:
        budget.check()
        raise OverBudgetError("SQL: the query took too long", "let it read fewer tensors or steps") from None
    except duckdb.OutOfMemoryException:
        raise OverBudgetError(
            f"SQL: the query needs more than {memory_mb} MiB",
            "let it read fewer tensors or steps, or aggregate",
        ) from None
    except duckdb.Error as error:
        if lost:  # DuckDB passes on only the text of what a scan raised
            raise lost[0] from None
        raise ConfigError(
            f"SQL: {first_line(error)}", "correct the query; the tables are statistics, tensors and losses"
        ) from None
    finally:
        connection.close()
    return Found(table.slice(0, rows), table.num_rows > rows)
