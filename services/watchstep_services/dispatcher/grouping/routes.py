"""Whom an alert reaches: by its project's routing tree, and by the receivers that its rule config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from watchstep_services.dispatcher.receivers import directory
from watchstep_services.dispatcher.receivers.routing import Route
from watchstep_services.service import Service


@dataclass(frozen=True)
class Found:
    """Whom an alert reaches, and names in its rule config that nobody is known for."""

    routes: tuple[Route, ...]
    unknown: tuple[str, ...]


def find_routes(
    service: Service, session: Session, project: str, labels: Mapping[str, str], notify: Sequence[str]
) -> Found:
    """Whom an alert reaches. Where nothing is configured, that is nobody."""
    routes = directory.routes_of(service, session, project, labels, notify)
    if not notify:
        return Found(routes, ())
    known = directory.known_receivers(service, session, project)
    return Found(routes, tuple(name for name in dict.fromkeys(notify) if name not in known))
