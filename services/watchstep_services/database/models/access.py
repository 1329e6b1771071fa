"""Who may do what."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.database.models.base import NAME_LENGTH, Base


class Token(Base):
    """A bearer token, hashed; the token itself is nowhere kept."""

    __tablename__ = "tokens"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str | None] = mapped_column(String(NAME_LENGTH), default=None)
    created_ns: Mapped[int]
