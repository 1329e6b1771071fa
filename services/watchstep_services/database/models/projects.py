"""Projects."""

from __future__ import annotations

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.database.models.base import NAME_LENGTH, Base


class Project(Base):
    """A project and the store that its runs lie on."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    store_url: Mapped[str] = mapped_column(Text)
    listed_ns: Mapped[int] = mapped_column(default=0)
