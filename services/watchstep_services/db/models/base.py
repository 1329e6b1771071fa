"""What all tables share. All times are nanoseconds since the epoch by the database's clock, unless a name says otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME_LENGTH = 128
RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[int]: JSON,
        int: BigInteger,
        str: String,
    }


class ClockMark(Base):
    """One row: how far the database's clock was seen to come, and its last step back (`db.clock`).

    ``before_ns``: where the clock stood before that step, 0 once nothing is left to be moved; ``stepped_ns``: where it came to.
    """

    __tablename__ = "clock_marks"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    seen_ns: Mapped[int]
    before_ns: Mapped[int] = mapped_column(default=0)
    stepped_ns: Mapped[int] = mapped_column(default=0)
