"""Who can be told in a project, and by which route: the project's own receivers, and the owner's for all projects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_services.channels.alertmanager import AlertmanagerReceiver
from watchstep_services.channels.kinds import RECEIVER
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.routing import RootNode, Route, routes_for
from watchstep_services.channels.secret_fields import SealedSecret, read_secret
from watchstep_services.core.egress import EgressPolicy, parse_allowed
from watchstep_services.core.redaction import keep_secret
from watchstep_services.core.settings import Settings
from watchstep_services.db.models import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.db.sealing import SecretBox
from watchstep_services.service.context import Service
from watchstep_services.tenancy.conflict import ConflictError

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

_log = logging.getLogger(__name__)


class UnreadableReceiverError(ConflictError):
    """A receiver is kept that this version does not understand."""


def routes_of(
    service: Service,
    session: Session,
    project: str,
    labels: Mapping[str, str],
    notify: Iterable[str] = (),
    tree: RootNode | None = None,
) -> tuple[Route, ...]:
    """Whom an alert of a project reaches; receivers that are not known are left out.

    An Alertmanager groups and repeats by itself, and takes an alert that it is not sent again for resolved: routes to one are
    sent at once, again at its own interval, and are marked ``refresh``.

    Args:
        service: the service.
        session: a transaction.
        project: the alert's.
        labels: the alert's.
        notify: receivers that its rule config names itself.
        tree: to try; the one that counts where it is None.
    """
    known = {receiver.name: receiver for receiver in list_receivers(service, session, project)}
    found = routes_for(tree or tree_of(service, session, project), labels, notify)
    return tuple(_as_it_takes(route, known[route.receiver]) for route in found if route.receiver in known)


def tree_of(service: Service, session: Session, project: str) -> RootNode:
    """The project's tree; the owner's file's where it has none of its own."""
    row = session.get(RoutingTree, project)
    return service.receiver_file.route if row is None else RootNode.model_validate(row.tree)


def list_receivers(service: Service, session: Session, project: str) -> list[Receiver]:
    """All receivers that a project has and that can be read, by name; the owner's go before its own of the same name."""
    rows = session.execute(select(ReceiverRow).filter_by(project=project)).scalars()
    found: dict[str, Receiver] = {}
    for row in rows:
        try:
            found[row.name] = stored_receiver(row)
        except UnreadableReceiverError as error:
            _log.warning("%s; nobody is told by it", error.what)  # and no other goes without
    found |= {receiver.name: receiver for receiver in service.receiver_file.receivers}
    return [found[name] for name in sorted(found)]


def known_receivers(service: Service, session: Session, project: str) -> frozenset[str]:
    """Names of all receivers that a project has."""
    rows = session.execute(select(ReceiverRow.name).filter_by(project=project)).scalars()
    return service.receiver_file.names | frozenset(rows)


def find_receiver(service: Service, session: Session, project: str, name: str) -> Receiver:
    """A receiver of a project.

    Raises:
        NotFoundError: there is none of that name.
        UnreadableReceiverError: a later version wrote it.
    """
    held: Receiver | None = service.receiver_file.find(name)
    if held is None:
        row = session.get(ReceiverRow, (project, name))
        if row is None:
            raise NotFoundError(
                f"receiver {name!r} of project {project}: not known", "write it, or check the name"
            )
        held = stored_receiver(row)
    return held


def stored_receiver(row: ReceiverRow) -> Receiver:
    """A receiver from its row.

    Raises:
        UnreadableReceiverError: a later version wrote it.
    """
    try:
        held: Receiver = RECEIVER.validate_python(row.config)
    except ValidationError as error:
        raise UnreadableReceiverError(
            f"receiver {row.name!r} of project {row.project}: this version cannot read its kind {row.kind!r} as it is kept",
            "write it anew, remove it, or run the version that wrote it",
        ) from error
    return held


def open_secrets(service: Service, session: Session, project: str, receiver: Receiver) -> dict[str, str]:
    """The secrets of a receiver, by field. They are for sending alone.

    Raises:
        ConfigError: one cannot be read or opened.
    """
    opened: dict[str, str] = {}
    for field, secret in receiver.secrets().items():
        if isinstance(secret, SealedSecret):
            row = session.get(ReceiverSecret, (project, receiver.name, field))
            if row is not None:
                place = seal_place(project, receiver.name, field)
                opened[field] = SecretBox(service.settings).open(place, row.encrypted)
        else:
            opened[field] = read_secret(field, secret)
        if field in opened:
            keep_secret(opened[field])  # whatever the answer of whom it is sent to repeats
    return opened


def seal_place(project: str, name: str, field: str) -> str:
    """What a secret is sealed for."""
    return f"{project}/{name}/{field}"


def reach_of(settings: Settings, project: str = "") -> EgressPolicy:
    """Where the service may be sent to, by what a project's users wrote.

    A service without a broker and a public URL that listens on its own machine alone is its user's own: loopback is allowed.

    Raises:
        ConfigError: the setting cannot be read.
    """
    own = not settings.broker_url and not settings.public_url and settings.host in _LOOPBACK_HOSTS
    reach = _reach(f"{settings.allowed_addresses},loopback" if own else settings.allowed_addresses)
    return replace(reach, project=project)


@lru_cache(maxsize=8)
def _reach(allowed: str) -> EgressPolicy:
    networks, hosts = parse_allowed(allowed)
    return EgressPolicy(networks, hosts)


def _as_it_takes(route: Route, receiver: Receiver) -> Route:
    if not isinstance(receiver, AlertmanagerReceiver):
        return route
    every = receiver.resend_seconds
    return replace(
        route,
        group_wait=0.0,
        group_interval=min(route.group_interval, every),
        repeat_interval=every,
        send_resolved=True,
        refresh=True,
    )
