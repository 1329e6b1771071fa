"""Lists in pages: a page follows its last item's place, so that what is added meanwhile neither shifts nor doubles anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from watchstep.errors import ConfigError

Row = TypeVar("Row")
Item = TypeVar("Item")

MAX_LIMIT = 1000
_MAX_TOKEN = 2048
_LARGEST = 2**63


class PageOutput(BaseModel):
    """A page of a list; the lists of the API extend it."""

    next_page_token: str | None = Field(
        None, description="Pass it as 'page_token' for the next page; null on the last one."
    )


@dataclass(frozen=True)
class ListOrder:
    """A column that a list is ordered by. All of them together are unique, and none changes: only then are pages stable."""

    column: InstrumentedAttribute[Any]
    descending: bool = False


@dataclass(frozen=True)
class Paging:
    """The page that a request asks for.

    Attributes:
        limit: most items.
        after: the place of the last item of the page before; None for the first page.
    """

    limit: int
    after: tuple[int | str, ...] | None
    _request: Request
    _response: Response

    def fetch(
        self,
        session: Session,
        entity: type[Row],
        conditions: Iterable[ColumnElement[bool]],
        *orders: ListOrder,
    ) -> tuple[list[Row], str | None]:
        """One page of rows, and the token of the next; the answer gets a ``Link`` header as well.

        Args:
            session: the transaction.
            entity: whose rows.
            conditions: all must hold.
            orders: see `ListOrder`; the columns belong to the entity.

        Raises:
            ConfigError: the token is not one of this list.
        """
        statement = select(entity).where(*conditions)
        if self.after is not None:
            statement = statement.where(_behind(orders, self._place(orders)))
        for order in orders:
            statement = statement.order_by(order.column.desc() if order.descending else order.column)
        rows = list(session.execute(statement.limit(self.limit + 1)).scalars())
        if len(rows) <= self.limit:
            return rows, None
        rows = rows[: self.limit]
        return rows, self.followed_by(*(getattr(rows[-1], order.column.key) for order in orders))

    def fetch_sorted(
        self, places: Sequence[tuple[Any, ...]], items: Sequence[Item]
    ) -> tuple[list[Item], str | None]:
        """One page of items that are in memory, by ascending unique places; as `fetch`."""
        start = 0
        if self.after is not None:
            kinds = tuple(type(part) for part in places[0]) if places else tuple(map(type, self.after))
            if tuple(type(part) for part in self.after) != kinds:
                raise _wrong()
            start = sum(place <= self.after for place in places)
        end = start + self.limit
        shown = list(items[start:end])
        return shown, None if end >= len(items) else self.followed_by(*places[end - 1])

    def followed_by(self, *place: int | str) -> str:
        """The token of the page after an item, told in the ``Link`` header as well."""
        token = (
            base64.urlsafe_b64encode(json.dumps(place, separators=(",", ":")).encode()).decode().rstrip("=")
        )
        url = self._request.url.include_query_params(page_token=token)
        self._response.headers["link"] = f'<{url.path}?{url.query}>; rel="next"'
        return token

    def _place(self, orders: Sequence[ListOrder]) -> tuple[int | str, ...]:
        assert self.after is not None
        kinds = tuple(order.column.type.python_type for order in orders)
        if tuple(type(part) for part in self.after) != kinds:
            raise _wrong()
        return self.after


def _behind(orders: Sequence[ListOrder], place: Sequence[Any]) -> ColumnElement[bool]:
    """Rows after a place, by lexical order."""
    cases = []
    for depth, order in enumerate(orders):
        equal = [held.column == value for held, value in zip(orders[:depth], place[:depth], strict=True)]
        later = order.column < place[depth] if order.descending else order.column > place[depth]
        cases.append(and_(*equal, later))
    return or_(*cases)


async def _asked(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Most items of the page.")] = 100,
    page_token: Annotated[
        str | None,
        Query(
            max_length=_MAX_TOKEN,
            description="Of the page before, as it was given; the first page where left out.",
        ),
    ] = None,
) -> Paging:
    return Paging(limit, None if not page_token else _read(page_token), request, response)


Paged = Annotated[Paging, Depends(_asked)]
"""A parameter of an endpoint whose answer comes in pages."""


def _read(token: str) -> tuple[int | str, ...]:
    try:
        place = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise _wrong() from None
    if not isinstance(place, list) or not place or not all(_is_place(part) for part in place):
        raise _wrong()
    return tuple(place)


def _is_place(part: object) -> bool:
    return (type(part) is int and -_LARGEST <= part < _LARGEST) or (type(part) is str and "\0" not in part)


def _wrong() -> ConfigError:
    return ConfigError(
        "page_token: not one that this list gave", "pass 'next_page_token' of the page before, unchanged"
    )
