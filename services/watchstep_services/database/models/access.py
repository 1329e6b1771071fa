"""Who may do what."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.database.models.base import NAME_LENGTH, Base


class Token(Base):
    """A bearer token, hashed; the token itself is nowhere kept. Its id is public."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str | None] = mapped_column(String(NAME_LENGTH), default=None, index=True)
    created_ns: Mapped[int]
    created_by: Mapped[str] = mapped_column(String(256), default="")
    expires_ns: Mapped[int | None] = mapped_column(default=None)
    revoked_ns: Mapped[int | None] = mapped_column(default=None)
    revoked_by: Mapped[str] = mapped_column(String(256), default="")
    last_used_ns: Mapped[int | None] = mapped_column(default=None)
