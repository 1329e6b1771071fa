"""How large the plan of a SQL query may get: DuckDB bounds a query's run in memory and time, not its planning.

A short query can be planned as millions of joins, where each table that it makes reads the one before it twice, or as
millions of sums, where each column does, or as thousands of columns, where each ``*`` stands for those of a table. So these are
counted before it is planned, as if what is made stood where it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_READS = 32
"""Tables that a query may read, each counted as often as it is read."""

MAX_NAMED = 64
"""Tables that a query may name, also where nothing reads what is made of them."""

MAX_EXPRESSIONS = 5_000
"""Expressions that a query may have, a column that it makes counted as often as it is named, and ``*`` as its columns."""

TABLE_COLUMNS = 32
"""Columns for which ``*`` counts where it stands for a given table; probes are not counted."""

MAX_NESTED = 32
"""How deep a query may stand within queries."""

_TABLES = frozenset(("BASE_TABLE", "EMPTY", "EXPRESSION_LIST"))
_GIVEN = {"tensors": 2, "losses": 2}  # views: each reads two tables
_Sizes = Mapping[str, int]


def check_size(tree: Any) -> None:
    """Hold a parsed query against the bounds.

    Args:
        tree: a statement, as DuckDB gives it in JSON.

    Raises:
        ValueError: it is over one of them; the message says which.
    """
    _reads(tree, _GIVEN, 0)
    _expressions(tree, {}, {}, 1)
    if sum(_is_table(item) for item in _within(tree, into_queries=True)) > MAX_NAMED:
        raise ValueError(f"the query names more than {MAX_NAMED} tables: name fewer")


def _reads(part: Any, made: _Sizes, depth: int) -> int:
    """How many tables a part of a query reads, where those in ``made`` read as many as it says."""
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
    """How many expressions a part of a query has.

    Args:
        part: of the tree.
        made: how many expressions each column has that is made around it.
        tables: how many columns each table has that is made around it.
        star: for how many columns ``*`` stands.
    """
    if _is_query(part):
        tables = _with_tables(part, tables)
        star = max(1, _columns(part.get("from_table"), tables))
        total = 0
        for key in ("from_table", "cte_map"):  # see no column made here
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
    """As `_expressions`, of an expression that is repeated for each column for which a ``*`` in it stands."""
    return _expressions(part, made, tables, star) * (star if _has_star(part) else 1)


def _with_tables(query: dict[str, Any], tables: _Sizes) -> _Sizes:
    """``tables``, and how many columns each has that a query makes for itself."""
    tables = dict(tables)
    for entry in query["cte_map"].get("map", []):
        tables[str(entry["key"]).lower()] = _columns(entry["value"], tables)
    return tables


def _columns(part: Any, tables: _Sizes) -> int:
    """How many columns a query gives; those of all tables in a part that is none."""
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
    """A part's mappings: itself and those within it, but of a query that stands in it or a constant only the outermost.

    Args:
        part: of the tree.
        without: what to leave out of the part itself.
        into_queries: what stands in a query in it as well.
    """
    waiting = [part]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            yield item
            if item is part:
                waiting.extend(value for key, value in item.items() if key not in without)
            elif item.get("class") != "CONSTANT" and (into_queries or not _is_query(item)):
                waiting.extend(item.values())
