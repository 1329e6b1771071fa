"""What all tables share. All times are nanoseconds since the epoch by the database's clock, unless a name says otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Integer, String
from sqlalchemy.orm import DeclarativeBase

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
