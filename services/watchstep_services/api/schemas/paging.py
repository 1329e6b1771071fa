"""Paged lists.

A page starts after the position of the previous page's last item, so that concurrent additions neither shift nor duplicate items.
"""

from __future__ import annotations

import base64
import heapq
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, and_, inspect, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Mapper, Session

from watchstep.errors import ConfigError

Row = TypeVar("Row")
Item = TypeVar("Item")

MAX_LIMIT = 1000
MAX_BYTES = 4 * 1024 * 1024
"""Size of a page's rows from which the page ends before its limit. It has one row at least."""

FREE_BYTES = 256 * 1024
"""Size up to which a page is read without a slot of a query."""

_FIRST_ROWS, _MOST_ROWS = 8, 128
"""Rows of the first statement, and of one of the later ones, each of which reads twice as many, so that a page is cut before all of it is in memory."""

_MAX_TOKEN = 2048
_LARGEST = 2**63


class PageOutput(BaseModel):
    """A page of a list; the lists of the API extend it."""

    next_page_token: str | None = Field(
        None, description="Token of the next page, to pass as 'page_token'; null on the last page."
    )


@dataclass(frozen=True)
class ListOrder:
    """A column that a list is ordered by. Together the columns must be unique and immutable, so that pages are stable."""

    column: InstrumentedAttribute[Any]
    descending: bool = False


@dataclass(frozen=True)
class Paging:
    """The page that a request selects.

    Attributes:
        limit: maximum number of items.
        after: position of the last item of the previous page; None for the first page.
    """

    limit: int
    after: tuple[int | str, ...] | None
    _request: Request
    _response: Response
    _occupy: Callable[[], object]

    def fetch(
        self,
        session: Session,
        entity: type[Row],
        conditions: Iterable[ColumnElement[bool]],
        *orders: ListOrder,
    ) -> tuple[list[Row], str | None]:
        """Return a page of rows and the token of the next page. Also set the ``Link`` header of the response.

        A page ends at `MAX_BYTES`, and occupies a slot of the project's queries beyond `FREE_BYTES`, until it is answered.

        Args:
            session: the transaction.
            entity: class of the rows.
            conditions: conditions, which must all be true.
            orders: columns of the entity, see `ListOrder`.

        Raises:
            ConfigError: the token does not belong to this list.
            RequestRefusedError: 429; the page is large, and too many queries are in progress.
        """
        rows: list[Row] = []
        size, is_free = 0, True
        for row in self._rows(session, entity, tuple(conditions), orders):
            size += _size_of(row)
            if rows and (len(rows) == self.limit or size > MAX_BYTES):
                return rows, self.next_token(*_position_of(rows[-1], orders))
            if is_free and size > FREE_BYTES:
                self._occupy()
                is_free = False
            rows.append(row)
        return rows, None

    def _rows(
        self,
        session: Session,
        entity: type[Row],
        conditions: Sequence[ColumnElement[bool]],
        orders: Sequence[ListOrder],
    ) -> Iterator[Row]:
        """Yield the rows of the page and the one after it, read in parts."""
        ordered = select(entity).where(*conditions)
        for order in orders:
            ordered = ordered.order_by(order.column.desc() if order.descending else order.column)
        after = None if self.after is None else self._position(orders)
        rest, most = self.limit + 1, _FIRST_ROWS
        while rest:
            statement = ordered if after is None else ordered.where(_after(orders, after))
            part = min(rest, most)
            rows = session.execute(statement.limit(part)).scalars().all()
            yield from rows
            if len(rows) < part:
                return
            after = _position_of(rows[-1], orders)
            rest, most = rest - part, min(2 * most, _MOST_ROWS)

    def fetch_sorted(
        self, positions: Sequence[tuple[Any, ...]], items: Sequence[Item]
    ) -> tuple[list[Item], str | None]:
        """Return a page of items in memory, which are sorted by ascending unique positions; like `fetch`."""
        return self.fetch_streamed(zip(positions, items, strict=True))

    def fetch_streamed(self, placed: Iterable[tuple[tuple[Any, ...], Item]]) -> tuple[list[Item], str | None]:
        """Return a page of items in any order, each with its unique position; like `fetch`. Keeps only the page in memory."""
        rest = iter(placed)
        after = self.after
        if after is not None and (first := next(rest, None)) is not None:
            if [type(part) for part in after] != [type(part) for part in first[0]]:
                raise _invalid_token()
            rest = (entry for entry in chain((first,), rest) if entry[0] > after)
        page = heapq.nsmallest(self.limit + 1, rest, key=itemgetter(0))
        items = [item for _, item in page[: self.limit]]
        return items, None if len(page) <= self.limit else self.next_token(*page[self.limit - 1][0])

    def fetch_fixed(self, items: Collection[Item]) -> tuple[list[Item], str | None]:
        """Return a page of items in memory whose order never changes, by their index; like `fetch`.

        Raises:
            ConfigError: the token does not belong to this list.
        """
        start = 0
        if self.after is not None:
            last, *more = self.after
            if more or not isinstance(last, int) or not 0 <= last < len(items):
                raise _invalid_token()
            start = last + 1
        end = start + self.limit
        page = list(islice(items, start, end))
        return page, None if end >= len(items) else self.next_token(end - 1)

    def next_token(self, *position: int | str) -> str:
        """Return the token of the page after an item, and set the ``Link`` header."""
        token = (
            base64.urlsafe_b64encode(json.dumps(position, separators=(",", ":")).encode())
            .decode()
            .rstrip("=")
        )
        url = self._request.url.include_query_params(page_token=token)
        self._response.headers["link"] = f'<{url.path}?{url.query}>; rel="next"'
        return token

    def _position(self, orders: Sequence[ListOrder]) -> tuple[int | str, ...]:
        assert self.after is not None
        kinds = tuple(order.column.type.python_type for order in orders)
        if tuple(type(part) for part in self.after) != kinds:
            raise _invalid_token()
        return self.after


def _position_of(row: object, orders: Sequence[ListOrder]) -> tuple[int | str, ...]:
    return tuple(getattr(row, order.column.key) for order in orders)


def _size_of(row: object) -> int:
    """Return about the size of a row's texts and documents in bytes."""
    mapper = inspect(type(row))
    assert isinstance(mapper, Mapper)
    return sum(_size(getattr(row, name)) for name in mapper.column_attrs.keys())  # noqa: SIM118 - not a mapping


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _size(entry) for name, entry in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return 8


def _after(orders: Sequence[ListOrder], position: Sequence[Any]) -> ColumnElement[bool]:
    """Return the condition for rows after a position, in lexical order."""
    cases = []
    for depth, order in enumerate(orders):
        equal = [
            earlier.column == value for earlier, value in zip(orders[:depth], position[:depth], strict=True)
        ]
        later = order.column < position[depth] if order.descending else order.column > position[depth]
        cases.append(and_(*equal, later))
    return or_(*cases)


class _Queries(Protocol):
    def large_page(self, project: str) -> AbstractContextManager[object]: ...


async def _paging(
    request: Request,
    response: Response,
    limit: Annotated[
        int,
        Query(ge=1, le=MAX_LIMIT, description="Maximum number of items. A page of large items has fewer."),
    ] = 100,
    page_token: Annotated[
        str | None,
        Query(
            max_length=_MAX_TOKEN,
            description="Field next_page_token of the previous page; default: the first page.",
        ),
    ] = None,
) -> AsyncIterator[Paging]:
    queries: _Queries = request.app.state.queries
    project = request.path_params.get("project", "")
    with ExitStack() as occupied:
        after = None if not page_token else _read(page_token)
        yield Paging(
            limit, after, request, response, lambda: occupied.enter_context(queries.large_page(project))
        )


Paged = Annotated[Paging, Depends(_paging, scope="function")]
"""Parameter of an endpoint that returns pages. Its slot is released when the answer is encoded, not when the client has read it."""


def _read(token: str) -> tuple[int | str, ...]:
    try:
        position = json.loads(
            base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        )
    except (ValueError, RecursionError):
        raise _invalid_token() from None
    if not isinstance(position, list) or not position or not all(_is_valid(part) for part in position):
        raise _invalid_token()
    return tuple(position)


def _is_valid(part: object) -> bool:
    return (type(part) is int and -_LARGEST <= part < _LARGEST) or (type(part) is str and "\0" not in part)


def _invalid_token() -> ConfigError:
    return ConfigError(
        "page_token: does not belong to this list", "pass 'next_page_token' of the previous page, unchanged"
    )
