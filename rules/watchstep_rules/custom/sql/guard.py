"""Checks of SQL rules: one SELECT over the given tables, with safe functions and a bounded plan.

DuckDB parses the text, and the syntax tree is compared with lists of what is allowed. Everything else is refused, including functions
that a later version of DuckDB adds.

DuckDB limits the memory and time of execution, but not of planning. A short query can expand to millions of joins (each table
expression reads the previous one twice), of sums (each column does), or to thousands of columns (each ``*`` expands to all columns of a
table). The guard counts these as if every expression were inlined, before the query is planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from watchstep.format.segment_checks import PROBE

if TYPE_CHECKING:
    import duckdb


TABLES = ("statistics", "tensors", "losses")
"""The tables that a query may name, in addition to its own table expressions."""

MAX_QUERY = 10_000
"""Maximum length of a query, in characters."""

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
"""The functions that a query may call. None reads a setting, a file, a clock or randomness, or builds a long text."""

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
        text: text to run; it may be enclosed in parentheses.
        tables: tables of `TABLES` that the query reads.
        columns: names of the columns that it may read, in lower case; None for all.
        probes: names of the probes among the columns, without the prefix.
    """

    text: str
    tables: frozenset[str]
    columns: frozenset[str] | None
    probes: tuple[str, ...]


@lru_cache(maxsize=256)
def guarded(query: str) -> AllowedQuery:
    """Check a query against the lists.

    Raises:
        ValueError: the query is not a single SELECT, or uses something forbidden; the message names it.
        MemoryError: parsing exceeds the memory limit of this process.
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
    table_expressions = {name.lower() for node in nodes for name in _made_tables(node)}
    for node in nodes:
        _check(node, table_expressions)
    check_size(tree)
    names = [
        str(node["column_names"][-1])
        for node in nodes
        if node.get("class") == "COLUMN_REF" and node.get("column_names")
    ]
    tables = {str(node.get("table_name", "")).lower() for node in nodes if node.get("type") == "BASE_TABLE"}
    has_star = any(node.get("class") == "STAR" for node in nodes)
    probes = sorted({name.removeprefix(PROBE) for name in names if name.startswith(PROBE)})
    columns = None if has_star else frozenset(name.lower() for name in names)
    return AllowedQuery(text, frozenset(tables.intersection(TABLES)), columns, tuple(probes))


def locked_database(module: Any, memory_mb: int = 64) -> duckdb.DuckDBPyConnection:
    """Open a new in-memory database that opens no file, loads no extension, stores nothing on disk and uses one thread.

    Lock its configuration once its tables exist: ``SET lock_configuration = true``.
    """
    connection: duckdb.DuckDBPyConnection = module.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_community_extensions": "false",
            "allow_unsigned_extensions": "false",
            "temp_directory": "",  # a query that would spill exceeds its memory limit
            "max_temp_directory_size": "0B",
            "memory_limit": f"{memory_mb}MiB",
            "threads": "1",
        },
    )
    connection.execute("SET python_enable_replacements = false")  # do not resolve tables as Python variables
    return connection


def first_line(error: Exception) -> str:
    """Return the message of a DuckDB error, without the excerpt of the query."""
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
    tree_json = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()[0]
    try:
        tree = json.loads(tree_json)
    except RecursionError:
        raise ValueError("the query is nested too deeply") from None
    if tree.get("error"):
        raise ValueError(str(tree.get("error_message", "DuckDB cannot take the query apart"))[:300])
    if len(tree["statements"]) != 1:
        raise ValueError("write one SELECT")
    return tree["statements"][0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings of the tree, except literals and types."""
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            skipped = _TYPES | _LITERALS if item.get("class") == "CONSTANT" else _TYPES
            pending.extend(child for key, child in item.items() if key not in skipped)
        elif isinstance(item, list):
            pending.extend(item)


def _made_tables(node: dict[str, Any]) -> list[str]:
    cte_map = node.get("cte_map")
    entries = cte_map.get("map", []) if isinstance(cte_map, dict) else []
    return [str(entry["key"]) for entry in entries] + ([str(node["cte_name"])] if "cte_name" in node else [])


def _check(node: dict[str, Any], table_expressions: set[str]) -> None:
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
            _check_table(node, table_expressions)
    if node.get("sample") or node.get("at_clause"):
        raise ValueError("samples may not be used: the same rows must give the same findings")
    if expression in {"FUNCTION", "WINDOW"} and _function(node) not in FUNCTIONS:
        raise ValueError(f"function {_function(node)!r} may not be used")
    if expression == "COLUMN_REF":
        names = [str(name).lower() for name in node.get("column_names", [])]
        if len(names) == 1 and names[0] in _OUTSIDE:
            raise ValueError(f"{names[0]!r} may not be used: the same rows must give the same findings")


def _check_table(node: dict[str, Any], table_expressions: set[str]) -> None:
    name = str(node.get("table_name", ""))
    qualifier = str(node.get("schema_name") or node.get("catalog_name") or "")
    if qualifier or name.lower() not in {*TABLES, *table_expressions}:
        full_name = f"{qualifier}.{name}" if qualifier else name
        raise ValueError(f"table {full_name[:80]!r} is not there; the tables are {', '.join(TABLES)}")


def _function(node: dict[str, Any]) -> str:
    name = str(node.get("function_name", "")).lower()
    return f"{node['schema']}.{name}"[:80] if node.get("schema") else name[:80]


def _word(kind: Any) -> str:
    return str(kind)[:40].lower().replace("_", " ")


MAX_READS = 32
"""Maximum number of table reads of a query; each read of a table counts."""

MAX_NAMED = 64
"""Maximum number of tables that a query names, including in unused table expressions."""

MAX_EXPRESSIONS = 5_000
"""Maximum number of expressions of a query. A computed column counts at each use, and ``*`` counts as its columns."""

TABLE_COLUMNS = 32
"""Number of columns that ``*`` counts for one of `TABLES`; probes are not counted."""

MAX_NESTED = 32
"""Maximum nesting depth of queries."""

_TABLES = frozenset(("BASE_TABLE", "EMPTY", "EXPRESSION_LIST"))
_GIVEN = {"tensors": 2, "losses": 2}  # views: each reads two tables
_Sizes = Mapping[str, int]


def check_size(tree: Any) -> None:
    """Check the size of a parsed query.

    Args:
        tree: a statement, as the JSON of DuckDB.

    Raises:
        ValueError: the query exceeds a limit; the message names it.
    """
    _reads(tree, _GIVEN, 0)
    _expressions(tree, {}, {}, 1)
    if sum(_is_table(item) for item in _within(tree, into_queries=True)) > MAX_NAMED:
        raise ValueError(f"the query names more than {MAX_NAMED} tables: name fewer")


def _reads(part: Any, made: _Sizes, depth: int) -> int:
    """Count the tables that a part of a query reads. A table expression in ``made`` counts as the number given there."""
    if depth > MAX_NESTED:
        raise ValueError(f"the query is nested too deeply: more than {MAX_NESTED} queries within each other")
    if _is_query(part):
        made = dict(made)
        for entry in part["cte_map"].get("map", []):
            made[str(entry["key"]).lower()] = _reads(entry["value"], made, depth)
    total = 0
    for item in _within(part, without=("cte_map",)):
        if _is_query(item) and item is not part:
            total += _reads(item, made, depth + 1)
        elif _is_table(item):
            total += made.get(str(item.get("table_name", "")).lower(), 1)
        if total > MAX_READS:
            raise ValueError(
                f"the query reads more than {MAX_READS} tables, each counted as often as what is made of it is read: "
                "name fewer, or each fewer times"
            )
    return total


def _expressions(part: Any, made: _Sizes, tables: _Sizes, star: int) -> int:
    """Count the expressions of a part of a query.

    Args:
        part: part of the tree.
        made: number of expressions of each computed column in scope.
        tables: number of columns of each table expression in scope.
        star: number of columns that ``*`` expands to.
    """
    if _is_query(part):
        tables = _with_tables(part, tables)
        star = max(1, _columns(part.get("from_table"), tables))
        total = 0
        for key in ("from_table", "cte_map"):  # columns computed here are out of scope
            total += _repeated(part.get(key), made, tables, star)
        for entry in part.get("select_list", []):
            size = _repeated(entry, made, tables, star)
            total += size
            made = {**made, str(entry.get("alias", "")).lower(): size}
        for key, value in part.items():
            if key not in {"from_table", "cte_map", "select_list"}:
                total += _repeated(value, made, tables, star)
    else:
        total = 0
        for item in _within(part):
            if _is_query(item):
                total += _expressions(item, made, tables, star)
            elif "class" in item:
                names = item.get("column_names")
                total += made.get(str(names[-1]).lower(), 1) if names else 1
            if total > MAX_EXPRESSIONS:
                break
    if total > MAX_EXPRESSIONS:
        raise ValueError(
            f"the query has more than {MAX_EXPRESSIONS} expressions, a column that it makes counted as often as it is "
            "named, and * as the columns for which it stands: make columns in a query within it, or fewer"
        )
    return total


def _repeated(part: Any, made: _Sizes, tables: _Sizes, star: int) -> int:
    """Count like `_expressions`, for an expression that a ``*`` in it repeats for each column."""
    return _expressions(part, made, tables, star) * (star if _has_star(part) else 1)


def _with_tables(query: dict[str, Any], tables: _Sizes) -> _Sizes:
    """Return ``tables`` with the number of columns of the query's own table expressions."""
    tables = dict(tables)
    for entry in query["cte_map"].get("map", []):
        tables[str(entry["key"]).lower()] = _columns(entry["value"], tables)
    return tables


def _columns(part: Any, tables: _Sizes) -> int:
    """Count the columns of a query's result; for another part, the columns of all its tables."""
    if _is_query(part):
        tables = _with_tables(part, tables)
        if "select_list" in part:
            star = max(1, _columns(part.get("from_table"), tables))
            return sum(star if _has_star(entry) else 1 for entry in part["select_list"])
    total = 0
    for item in _within(part, without=("cte_map",)):
        if _is_query(item) and item is not part:
            total += _columns(item, tables)
        elif _is_table(item):
            total += tables.get(str(item.get("table_name", "")).lower(), TABLE_COLUMNS)
    return total


def _has_star(part: Any) -> bool:
    return any(item.get("class") == "STAR" for item in _within(part))


def _is_query(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("cte_map"), dict)


def _is_table(item: dict[str, Any]) -> bool:
    return "class" not in item and str(item.get("type")) in _TABLES


def _within(
    part: Any, without: tuple[str, ...] = (), *, into_queries: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a part and the mappings within it. Of a nested query or a constant, yield only the outermost mapping.

    Args:
        part: part of the tree.
        without: keys of the part itself to skip.
        into_queries: whether to descend into nested queries.
    """
    pending = [part]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            yield item
            if item is part:
                pending.extend(value for key, value in item.items() if key not in without)
            elif item.get("class") != "CONSTANT" and (into_queries or not _is_query(item)):
                pending.extend(item.values())
