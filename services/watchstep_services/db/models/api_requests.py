"""Requests that are answered once, and rule configs of projects."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base
from watchstep_services.db.sealed_addresses import AddressJson, SealedText


class ApiRequest(Base):
    """A request with an Idempotency-Key and its answer; ``status`` is null while it is under way.

    ``name`` is a hash of the token and the key, ``request`` one of what was asked.
    """

    __tablename__ = "api_requests"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None] = mapped_column(default=None)
    body: Mapped[str] = mapped_column(SealedText, default="")
    claimed_ns: Mapped[int]
    expires_ns: Mapped[int] = mapped_column(index=True)


class ProjectRule(Base):
    """A rule config of a project: it judges every run that is registered from then on."""

    __tablename__ = "project_rules"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    data: Mapped[dict[str, Any]] = mapped_column(AddressJson)
    changed_ns: Mapped[int]
