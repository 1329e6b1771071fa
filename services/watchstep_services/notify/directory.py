"""Receivers and routing trees of projects: read, tried and written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError, WatchstepError
from watchstep_services.auth.tokens import AuthenticatedCaller
from watchstep_services.channels.alertmanager import AlertmanagerReceiver
from watchstep_services.channels.kinds import RECEIVER
from watchstep_services.channels.receiver import (
    EncryptedSecret,
    FromEnvironment,
    FromFile,
    PlainSecret,
    Receiver,
    read_secret,
)
from watchstep_services.channels.routing import RootNode, Route, routes_for
from watchstep_services.core.egress import EgressPolicy, parse_allowed
from watchstep_services.core.redaction import keep_secret
from watchstep_services.core.settings import Settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import SecretBox
from watchstep_services.db.models import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.service.context import Service
from watchstep_services.tenancy.projects import ConflictError

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
    receivers = {receiver.name: receiver for receiver in list_receivers(service, session, project)}
    routes = routes_for(tree or tree_of(service, session, project), labels, notify)
    return tuple(
        _as_it_takes(route, receivers[route.receiver]) for route in routes if route.receiver in receivers
    )


def tree_of(service: Service, session: Session, project: str) -> RootNode:
    """The project's tree; the owner's file's where it has none of its own."""
    row = session.get(RoutingTree, project)
    return service.receiver_file.route if row is None else RootNode.model_validate(row.tree)


def list_receivers(service: Service, session: Session, project: str) -> list[Receiver]:
    """All receivers that a project has and that can be read, by name; the owner's go before its own of the same name."""
    rows = session.execute(select(ReceiverRow).filter_by(project=project)).scalars()
    receivers: dict[str, Receiver] = {}
    for row in rows:
        try:
            receivers[row.name] = stored_receiver(row)
        except UnreadableReceiverError as error:
            _log.warning("%s; nobody is told by it", error.what)  # and no other goes without
    receivers |= {receiver.name: receiver for receiver in service.receiver_file.receivers}
    return [receivers[name] for name in sorted(receivers)]


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
    receiver: Receiver | None = service.receiver_file.find(name)
    if receiver is None:
        row = session.get(ReceiverRow, (project, name))
        if row is None:
            raise NotFoundError(
                f"receiver {name!r} of project {project}: not known", "write it, or check the name"
            )
        receiver = stored_receiver(row)
    return receiver


def stored_receiver(row: ReceiverRow) -> Receiver:
    """A receiver from its row.

    Raises:
        UnreadableReceiverError: a later version wrote it.
    """
    try:
        receiver: Receiver = RECEIVER.validate_python(row.config)
    except ValidationError as error:
        raise UnreadableReceiverError(
            f"receiver {row.name!r} of project {row.project}: this version cannot read its kind {row.kind!r} as it is kept",
            "write it anew, remove it, or run the version that wrote it",
        ) from error
    return receiver


def open_secrets(service: Service, session: Session, project: str, receiver: Receiver) -> dict[str, str]:
    """The secrets of a receiver, by field. They are for sending alone.

    Raises:
        ConfigError: one cannot be read or opened.
    """
    opened: dict[str, str] = {}
    for field, secret in receiver.secrets().items():
        if isinstance(secret, EncryptedSecret):
            row = session.get(ReceiverSecret, (project, receiver.name, field))
            if row is not None:
                place = secret_context(project, receiver.name, field)
                opened[field] = SecretBox(service.settings).decrypt(place, row.encrypted)
        else:
            opened[field] = read_secret(field, secret)
        if field in opened:
            keep_secret(opened[field])  # whatever the answer of whom it is sent to repeats
    return opened


def secret_context(project: str, name: str, field: str) -> str:
    """What a secret is encrypted for."""
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


MOST_RECEIVERS = 200
"""Of a project."""


class ForbiddenError(WatchstepError):
    """A change that this role may not make."""


class InUseError(WatchstepError):
    """A change that others stand in the way of."""


def put_receiver(
    service: Service, session: Session, project: str, receiver: Receiver, caller: AuthenticatedCaller
) -> ReceiverRow:
    """Make a receiver, or replace it. Secrets that are given are encrypted; those that are stored stay.

    Raises:
        ForbiddenError: only an admin may write it.
        InUseError: the name is one of the owner's.
        ConfigError: an address is not allowed, a secret cannot be used or kept, or there are too many.
    """
    if receiver.name in service.receiver_file.names:
        raise InUseError(
            f"receiver {receiver.name!r}: stands in the owner's file",
            "choose another name, or change the file",
        )
    row = session.get(ReceiverRow, (project, receiver.name), with_for_update=True)
    before = None if row is None else _held(row, caller)
    _check_rights(receiver, before, caller)
    _check_addresses(service, receiver)
    encrypted = _encrypted(service, project, receiver, before)
    if row is None:
        _check_number(session, project)
        row = ReceiverRow(
            project=project, name=receiver.name, kind="", config={}, written_ns=0, written_by=""
        )
        session.add(row)
    row.kind, row.config = str(receiver.as_data()["kind"]), receiver.as_data()
    row.written_ns, row.written_by = read_clock(session), caller.who[:256]
    session.flush()
    kept = [field for field, secret in receiver.secrets().items() if isinstance(secret, EncryptedSecret)]
    session.execute(
        delete(ReceiverSecret).where(
            ReceiverSecret.project == project,
            ReceiverSecret.name == receiver.name,
            ReceiverSecret.field.not_in(kept),
        )
    )
    for field, text in encrypted.items():
        session.add(ReceiverSecret(project=project, name=receiver.name, field=field, encrypted=text))
    return row


def delete_receiver(
    service: Service, session: Session, project: str, name: str, caller: AuthenticatedCaller
) -> ReceiverRow:
    """Remove a receiver and its secrets.

    Raises:
        NotFoundError: the project has none of its own of that name.
        ForbiddenError: only an admin may remove it.
        InUseError: the routing tree names it.
    """
    row = session.get(ReceiverRow, (project, name), with_for_update=True)
    if row is None:
        raise NotFoundError(f"receiver {name!r} of project {project}: not known", "check the name")
    _check_rights(None, _held(row, caller), caller)
    if name in tree_of(service, session, project).receivers():
        raise InUseError(f"receiver {name!r}: the routing tree names it", "take it out of the tree first")
    session.execute(delete(ReceiverSecret).filter_by(project=project, name=name))
    session.delete(row)
    return row


def put_tree(
    service: Service, session: Session, project: str, tree: RootNode, caller: AuthenticatedCaller
) -> None:
    """Make the project's routing tree, or replace it.

    Raises:
        ConfigError: it names a receiver that the project does not have.
    """
    unknown = sorted(tree.receivers() - known_receivers(service, session, project))
    if unknown:
        raise ConfigError(
            f"route: receiver {unknown[0]!r} of project {project}: not known", "write the receiver first"
        )
    row = session.get(RoutingTree, project, with_for_update=True)
    if row is None:
        row = RoutingTree(project=project, tree={}, written_ns=0, written_by="")
        session.add(row)
    row.tree, row.written_ns, row.written_by = tree.as_data(), read_clock(session), caller.who[:256]
    session.flush()


def delete_tree(session: Session, project: str) -> None:
    """Let the owner's tree count again."""
    session.execute(delete(RoutingTree).filter_by(project=project))


def _held(row: ReceiverRow, caller: AuthenticatedCaller) -> Receiver | None:
    """A receiver as it is kept; None where this version cannot read it, and the caller may replace whatever it is."""
    try:
        return stored_receiver(row)
    except UnreadableReceiverError as error:
        if caller.may("administer"):
            return None
        raise ForbiddenError(error.what, "ask an admin to write it anew or to remove it") from error


def _check_rights(after: Receiver | None, before: Receiver | None, caller: AuthenticatedCaller) -> None:
    for receiver in (after, before):
        if receiver is None:
            continue
        secrets = receiver.secrets().values()
        if any(isinstance(secret, FromFile) for secret in secrets):
            raise ForbiddenError(
                f"receiver {receiver.name!r}: a secret from a file",
                "only the owner's file of receivers may name files",
            )
        if caller.may("administer"):
            continue
        if receiver.administered:
            raise ForbiddenError(
                f"receiver {receiver.name!r}: acts in AWS with the service's rights",
                "ask an admin to write it",
            )
        if any(isinstance(secret, FromEnvironment) for secret in secrets):
            raise ForbiddenError(
                f"receiver {receiver.name!r}: takes a secret from the service's environment",
                "ask an admin to write it, or give the secret itself",
            )


def _check_addresses(service: Service, receiver: Receiver) -> None:
    reach = reach_of(service.settings)
    for host in receiver.hosts:
        reach.check_literal(host)


def _check_number(session: Session, project: str) -> None:
    number = session.execute(
        select(func.count()).select_from(ReceiverRow).filter_by(project=project)
    ).scalar_one()
    if number >= MOST_RECEIVERS:
        raise ConfigError(f"project {project}: has {number} receivers, the most there may be", "remove some")


def _encrypted(service: Service, project: str, receiver: Receiver, before: Receiver | None) -> dict[str, str]:
    encrypted = {}
    for field, secret in receiver.secrets().items():
        if isinstance(secret, PlainSecret):
            text = secret.value.get_secret_value()
            receiver.check_secret(field, text)
            encrypted[field] = SecretBox(service.settings).encrypt(
                secret_context(project, receiver.name, field), text
            )
        elif isinstance(secret, EncryptedSecret):
            _check_kept(receiver, before, field)
    return encrypted


def _check_kept(receiver: Receiver, before: Receiver | None, field: str) -> None:
    held = None if before is None or type(before) is not type(receiver) else before.secrets().get(field)
    if not isinstance(held, EncryptedSecret):
        raise ConfigError(
            f"secret {field!r} of receiver {receiver.name!r}: none is kept", "give the secret itself"
        )
    assert before is not None
    if before.destination != receiver.destination:
        # Else who may not read it could have it sent to an address of their own.
        raise ConfigError(
            f"secret {field!r} of receiver {receiver.name!r}: is kept for another address",
            "give the secret anew together with the new address",
        )
