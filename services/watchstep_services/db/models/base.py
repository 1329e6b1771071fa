"""The base class of all tables. All times are nanoseconds since the epoch by the database's clock, unless stated otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME_LENGTH = 128
RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base class of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[int]: JSON,
        int: BigInteger,
        str: String,
    }


class ClockMark(Base):
    """One row: the highest value of the database's clock, and its last step back (`db.clock`).

    ``before_ns``: the clock before that step, 0 once no times are left to move; ``stepped_ns``: the clock after it.
    """

    __tablename__ = "clock_marks"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    seen_ns: Mapped[int]
    before_ns: Mapped[int] = mapped_column(default=0)
    stepped_ns: Mapped[int] = mapped_column(default=0)
