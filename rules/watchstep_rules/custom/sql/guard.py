"""What a SQL rule may say: one SELECT over the given tables, in functions that look at nothing else.

DuckDB parses the text, and the tree that it gives is held against lists of what is allowed. Whatever is not on a list is
refused: a function that a later version of DuckDB brings as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from watchstep.format.segment import PROBE
from watchstep_rules.custom.sql.size import check_size

if TYPE_CHECKING:
    import duckdb

TABLES = ("statistics", "tensors", "losses")
"""The tables that a query may name, besides those that it makes itself."""

MAX_QUERY = 10_000
"""Longest query, in characters."""

_OPERATORS = "+ - * / // % ** ^ || ~~ !~~ ~~* !~~* ~ !~ regexp_full_match"
_NUMBERS = (
    "abs acos acosh asin asinh atan atan2 atanh cbrt ceil ceiling cos cosh cot degrees even exp floor gcd greatest "
    "isfinite isinf isnan lcm least ln log log10 log2 pi pow power radians round sign sin sinh sqrt tan tanh trunc"
)
_WORDS = (
    "contains ends_with instr left length lower ltrim prefix regexp_extract regexp_matches right rtrim starts_with "
    "strlen substr substring suffix trim upper list_contains"
)
_CHOICES = "coalesce if ifnull nullif"
_AGGREGATES = (
    "any_value arg_max arg_min avg bit_and bit_or bit_xor bool_and bool_or corr count count_if count_star countif "
    "covar_pop covar_samp entropy favg first fsum geomean geometric_mean kahan_sum kurtosis kurtosis_pop last mad max "
    "max_by mean median min min_by mode product quantile quantile_cont quantile_disc regr_avgx regr_avgy regr_count "
    "regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy sem skewness stddev stddev_pop stddev_samp sum "
    "sum_no_overflow sumkahan var_pop var_samp variance"
)
_WINDOWS = (
    "cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank row_number"
)
FUNCTIONS = frozenset(f"{_OPERATORS} {_NUMBERS} {_WORDS} {_CHOICES} {_AGGREGATES} {_WINDOWS}".split())
"""The functions that a query may call. None reads a setting, a file, a clock or chance, or makes a long text."""

_EXPRESSIONS = frozenset(
    (
        "COLUMN_REF", "CONSTANT", "FUNCTION", "WINDOW", "COMPARISON", "CONJUNCTION", "OPERATOR", "CASE", "CAST",
        "BETWEEN", "SUBQUERY", "STAR", "TYPE", "POSITIONAL_REFERENCE",
    )
)  # fmt: skip
_NODES = frozenset(
    (
        "SELECT_NODE", "SET_OPERATION_NODE", "ORDER_MODIFIER", "LIMIT_MODIFIER", "DISTINCT_MODIFIER",
        "LIMIT_PERCENT_MODIFIER", "ORDER_DEFAULT", "ASCENDING", "DESCENDING", "BASE_TABLE", "SUBQUERY", "JOIN", "EMPTY",
        "EXPRESSION_LIST",
    )
)  # fmt: skip
_OUTSIDE = frozenset(
    (
        "current_catalog", "current_date", "current_role", "current_schema", "current_time", "current_timestamp",
        "current_user", "localtime", "localtimestamp", "session_user", "user",
    )
)  # fmt: skip
_TYPES = frozenset(("cast_type", "type_info", "extension_type_info"))
_LITERALS = frozenset(("value", "literal"))


@dataclass(frozen=True)
class AllowedQuery:
    """A query that passed.

    Attributes:
        text: what to run; it may stand in parentheses.
        tables: which of `TABLES` it reads.
        columns: names of columns that it may read, in lower case; None for all.
        probes: names of the probes among them, without the prefix.
    """

    text: str
    tables: frozenset[str]
    columns: frozenset[str] | None
    probes: tuple[str, ...]


@lru_cache(maxsize=256)
def guarded(query: str) -> AllowedQuery:
    """Hold a query against the lists.

    Raises:
        ValueError: it is no single SELECT, or names what it may not; the message says what.
        MemoryError: parsing it takes more than this process may.
    """
    import duckdb

    if len(query) > MAX_QUERY:
        raise ValueError(f"the query has {len(query)} characters, at most {MAX_QUERY} are taken")
    connection = locked_database(duckdb)
    try:
        text = _single_select(connection, query)
        tree = _tree(connection, text)
    except duckdb.Error as error:
        raise ValueError(first_line(error)) from None
    finally:
        connection.close()
    nodes = list(_nodes(tree))
    made = {name.lower() for node in nodes for name in _made_tables(node)}
    for node in nodes:
        _check(node, made)
    check_size(tree)
    names = [
        str(node["column_names"][-1])
        for node in nodes
        if node.get("class") == "COLUMN_REF" and node.get("column_names")
    ]
    tables = {str(node.get("table_name", "")).lower() for node in nodes if node.get("type") == "BASE_TABLE"}
    every = any(node.get("class") == "STAR" for node in nodes)
    probes = sorted({name.removeprefix(PROBE) for name in names if name.startswith(PROBE)})
    columns = None if every else frozenset(name.lower() for name in names)
    return AllowedQuery(text, frozenset(tables.intersection(TABLES)), columns, tuple(probes))


def locked_database(module: Any, memory_mb: int = 64) -> duckdb.DuckDBPyConnection:
    """A database of its own in memory that opens no file, loads no extension, keeps nothing on disk, has one thread.

    Its configuration can be locked once its tables are there: ``SET lock_configuration = true``.
    """
    connection: duckdb.DuckDBPyConnection = module.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "allow_unsigned_extensions": "false",
            "temp_directory": "",  # a query that would spill is over its memory limit
            "max_temp_directory_size": "0B",
            "memory_limit": f"{memory_mb}MiB",
            "threads": "1",
        },
    )
    connection.execute("SET python_enable_replacements = false")  # no table is looked for among variables
    return connection


def first_line(error: Exception) -> str:
    """What an error of DuckDB says, without the picture of the place."""
    return str(error).strip().split("\n", 1)[0][:300]


def _single_select(connection: Any, query: str) -> str:
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise ValueError(f"the query is {len(statements)} statements, write one SELECT")
    if statements[0].type.name != "SELECT":
        raise ValueError(f"the query is a statement of kind {statements[0].type.name}, write one SELECT")
    text = str(statements[0].query).strip()
    return text.removesuffix(";")


def _tree(connection: Any, text: str) -> Any:
    held = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()[0]
    try:
        tree = json.loads(held)
    except RecursionError:
        raise ValueError("the query is nested too deeply") from None
    if tree.get("error"):
        raise ValueError(str(tree.get("error_message", "DuckDB cannot take the query apart"))[:300])
    if len(tree["statements"]) != 1:
        raise ValueError("write one SELECT")
    return tree["statements"][0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All mappings of the tree but those that only hold a literal or a type."""
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            left_out = _TYPES | _LITERALS if item.get("class") == "CONSTANT" else _TYPES
            waiting.extend(child for key, child in item.items() if key not in left_out)
        elif isinstance(item, list):
            waiting.extend(item)


def _made_tables(node: dict[str, Any]) -> list[str]:
    made = node.get("cte_map")
    entries = made.get("map", []) if isinstance(made, dict) else []
    return [str(entry["key"]) for entry in entries] + ([str(node["cte_name"])] if "cte_name" in node else [])


def _check(node: dict[str, Any], made: set[str]) -> None:
    kind, expression = node.get("type"), node.get("class")
    if expression is not None:
        if expression not in _EXPRESSIONS:
            raise ValueError(f"an expression of kind {_word(expression)} may not be used")
    elif isinstance(kind, str):
        if kind == "RECURSIVE_CTE_NODE":
            raise ValueError("recursive queries may not be used")
        if kind == "TABLE_FUNCTION":
            raise ValueError(f"table function {_function(node['function'])!r} may not be used")
        if kind not in _NODES:
            raise ValueError(f"a part of kind {_word(kind)} may not be used")
        if kind == "BASE_TABLE":
            _check_table(node, made)
    if node.get("sample") or node.get("at_clause"):
        raise ValueError("samples may not be used: the same rows must give the same findings")
    if expression in {"FUNCTION", "WINDOW"} and _function(node) not in FUNCTIONS:
        raise ValueError(f"function {_function(node)!r} may not be used")
    if expression == "COLUMN_REF":
        names = [str(name).lower() for name in node.get("column_names", [])]
        if len(names) == 1 and names[0] in _OUTSIDE:
            raise ValueError(f"{names[0]!r} may not be used: the same rows must give the same findings")


def _check_table(node: dict[str, Any], made: set[str]) -> None:
    name = str(node.get("table_name", ""))
    within = str(node.get("schema_name") or node.get("catalog_name") or "")
    if within or name.lower() not in {*TABLES, *made}:
        whole = f"{within}.{name}" if within else name
        raise ValueError(f"table {whole[:80]!r} is not there; the tables are {', '.join(TABLES)}")


def _function(node: dict[str, Any]) -> str:
    name = str(node.get("function_name", "")).lower()
    return f"{node['schema']}.{name}"[:80] if node.get("schema") else name[:80]


def _word(kind: Any) -> str:
    return str(kind)[:40].lower().replace("_", " ")
