"""Receivers and routing trees of projects: reading, checking and writing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError, WatchstepError
from watchstep_services.auth import AuthenticatedCaller
from watchstep_services.channels.alertmanager import AlertmanagerReceiver
from watchstep_services.channels.receiver import (
    EncryptedSecret,
    FromEnvironment,
    FromFile,
    PlainSecret,
    Receiver,
    read_secret,
)
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.routing import RootNode, Route, routes_for
from watchstep_services.core.egress import EgressPolicy, parse_allowed
from watchstep_services.core.redaction import keep_secret
from watchstep_services.core.settings import Settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import SecretBox
from watchstep_services.db.models import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.service.context import Service
from watchstep_services.tenancy import ConflictError

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

_log = logging.getLogger(__name__)


class UnreadableReceiverError(ConflictError):
    """A stored receiver cannot be read by this version."""


def routes_of(
    service: Service,
    session: Session,
    project: str,
    labels: Mapping[str, str],
    notify: Iterable[str] = (),
    tree: RootNode | None = None,
) -> tuple[Route, ...]:
    """The routes of a project's alert; receivers that do not exist are left out.

    An Alertmanager groups and repeats by itself, and resolves an alert that is not sent again: routes to one have no group
    wait, repeat at the receiver's own interval, and are marked ``refresh``.

    Args:
        service: the service.
        session: a transaction.
        project: the alert's project.
        labels: the alert's labels.
        notify: receivers that its rule config names.
        tree: a tree to preview; None for the current one.
    """
    receivers = {receiver.name: receiver for receiver in list_receivers(service, session, project)}
    routes = routes_for(tree or tree_of(service, session, project), labels, notify)
    return tuple(
        _for_receiver(route, receivers[route.receiver]) for route in routes if route.receiver in receivers
    )


def tree_of(service: Service, session: Session, project: str) -> RootNode:
    """The project's routing tree, or the tree of the owner's file."""
    row = session.get(RoutingTree, project)
    return service.receiver_file.route if row is None else RootNode.model_validate(row.tree)


def list_receivers(service: Service, session: Session, project: str) -> list[Receiver]:
    """All readable receivers of a project, by name; the owner's replace the project's of the same name."""
    rows = session.execute(select(ReceiverRow).filter_by(project=project)).scalars()
    receivers: dict[str, Receiver] = {}
    for row in rows:
        try:
            receivers[row.name] = stored_receiver(row)
        except UnreadableReceiverError as error:
            _log.warning("%s; it is not notified", error.what)  # the other receivers are
    receivers |= {receiver.name: receiver for receiver in service.receiver_file.receivers}
    return [receivers[name] for name in sorted(receivers)]


def known_receivers(service: Service, session: Session, project: str) -> frozenset[str]:
    """Names of all receivers of a project."""
    rows = session.execute(select(ReceiverRow.name).filter_by(project=project)).scalars()
    return service.receiver_file.names | frozenset(rows)


def find_receiver(service: Service, session: Session, project: str, name: str) -> Receiver:
    """Find a receiver of a project.

    Raises:
        NotFoundError: it does not exist.
        UnreadableReceiverError: a later version wrote it.
    """
    receiver: Receiver | None = service.receiver_file.find(name)
    if receiver is None:
        row = session.get(ReceiverRow, (project, name))
        if row is None:
            raise NotFoundError(
                f"receiver {name!r} of project {project}: not found", "write it, or check the name"
            )
        receiver = stored_receiver(row)
    return receiver


def stored_receiver(row: ReceiverRow) -> Receiver:
    """Parse a receiver's row.

    Raises:
        UnreadableReceiverError: a later version wrote it.
    """
    try:
        receiver: Receiver = RECEIVER.validate_python(row.config)
    except ValidationError as error:
        raise UnreadableReceiverError(
            f"receiver {row.name!r} of project {row.project}: this version cannot read the stored receiver of kind {row.kind!r}",
            "write it again, remove it, or run the version that wrote it",
        ) from error
    return receiver


def open_secrets(service: Service, session: Session, project: str, receiver: Receiver) -> dict[str, str]:
    """Decrypt or read the secrets of a receiver, by field, for a delivery.

    Raises:
        ConfigError: a secret cannot be read or decrypted.
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
            keep_secret(opened[field])  # redacts it if the receiver's answer repeats it
    return opened


def secret_context(project: str, name: str, field: str) -> str:
    """The context to which a secret's encryption is bound."""
    return f"{project}/{name}/{field}"


def egress_policy_of(settings: Settings, project: str = "") -> EgressPolicy:
    """The addresses that users of a project may have the service send to.

    A service without a broker and a public URL that listens only on its own machine is its user's own, so loopback is allowed.

    Raises:
        ConfigError: the setting cannot be parsed.
    """
    own = not settings.broker_url and not settings.public_url and settings.host in _LOOPBACK_HOSTS
    policy = _parsed_policy(f"{settings.allowed_addresses},loopback" if own else settings.allowed_addresses)
    return replace(policy, project=project)


@lru_cache(maxsize=8)
def _parsed_policy(allowed: str) -> EgressPolicy:
    networks, hosts = parse_allowed(allowed)
    return EgressPolicy(networks, hosts)


def _for_receiver(route: Route, receiver: Receiver) -> Route:
    if not isinstance(receiver, AlertmanagerReceiver):
        return route
    interval = receiver.resend_seconds
    return replace(
        route,
        group_wait=0.0,
        group_interval=min(route.group_interval, interval),
        repeat_interval=interval,
        send_resolved=True,
        refresh=True,
    )


MOST_RECEIVERS = 200
"""Limit for each project."""


class ForbiddenError(WatchstepError):
    """The caller's role may not make this change."""


class InUseError(WatchstepError):
    """Other objects prevent this change."""


def put_receiver(
    service: Service, session: Session, project: str, receiver: Receiver, caller: AuthenticatedCaller
) -> ReceiverRow:
    """Create or replace a receiver. New secrets are encrypted; references to stored secrets keep them.

    Raises:
        ForbiddenError: only an admin may write it.
        InUseError: the owner's file has a receiver of this name.
        ConfigError: an address is not allowed, a secret cannot be used or stored, or there are too many receivers.
    """
    if receiver.name in service.receiver_file.names:
        raise InUseError(
            f"receiver {receiver.name!r}: defined in the owner's file",
            "choose another name, or change the file",
        )
    row = session.get(ReceiverRow, (project, receiver.name), with_for_update=True)
    before = None if row is None else _stored(row, caller)
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
    stored = [field for field, secret in receiver.secrets().items() if isinstance(secret, EncryptedSecret)]
    session.execute(
        delete(ReceiverSecret).where(
            ReceiverSecret.project == project,
            ReceiverSecret.name == receiver.name,
            ReceiverSecret.field.not_in(stored),
        )
    )
    for field, text in encrypted.items():
        session.add(ReceiverSecret(project=project, name=receiver.name, field=field, encrypted=text))
    return row


def delete_receiver(
    service: Service, session: Session, project: str, name: str, caller: AuthenticatedCaller
) -> ReceiverRow:
    """Delete a receiver and its secrets.

    Raises:
        NotFoundError: the project has no receiver of its own with that name.
        ForbiddenError: only an admin may remove it.
        InUseError: the routing tree names it.
    """
    row = session.get(ReceiverRow, (project, name), with_for_update=True)
    if row is None:
        raise NotFoundError(f"receiver {name!r} of project {project}: not found", "check the name")
    _check_rights(None, _stored(row, caller), caller)
    if name in tree_of(service, session, project).receivers():
        raise InUseError(f"receiver {name!r}: in use by the routing tree", "remove it from the tree first")
    session.execute(delete(ReceiverSecret).filter_by(project=project, name=name))
    session.delete(row)
    return row


def put_tree(
    service: Service, session: Session, project: str, tree: RootNode, caller: AuthenticatedCaller
) -> None:
    """Create or replace the project's routing tree.

    Raises:
        ConfigError: it names a receiver that the project does not have.
    """
    unknown = sorted(tree.receivers() - known_receivers(service, session, project))
    if unknown:
        raise ConfigError(
            f"route: receiver {unknown[0]!r} of project {project}: not found", "write the receiver first"
        )
    row = session.get(RoutingTree, project, with_for_update=True)
    if row is None:
        row = RoutingTree(project=project, tree={}, written_ns=0, written_by="")
        session.add(row)
    row.tree, row.written_ns, row.written_by = tree.as_data(), read_clock(session), caller.who[:256]
    session.flush()


def delete_tree(session: Session, project: str) -> None:
    """Delete the project's routing tree, so that the owner's applies."""
    session.execute(delete(RoutingTree).filter_by(project=project))


def _stored(row: ReceiverRow, caller: AuthenticatedCaller) -> Receiver | None:
    """The stored receiver; None if this version cannot read it and the caller may replace any receiver."""
    try:
        return stored_receiver(row)
    except UnreadableReceiverError as error:
        if caller.may("administer"):
            return None
        raise ForbiddenError(error.what, "ask an admin to write it again or to remove it") from error


def _check_rights(after: Receiver | None, before: Receiver | None, caller: AuthenticatedCaller) -> None:
    for receiver in (after, before):
        if receiver is None:
            continue
        secrets = receiver.secrets().values()
        if any(isinstance(secret, FromFile) for secret in secrets):
            raise ForbiddenError(
                f"receiver {receiver.name!r}: refers to a secret in a file",
                "only the owner's file of receivers may name files",
            )
        if caller.may("administer"):
            continue
        if receiver.administered:
            raise ForbiddenError(
                f"receiver {receiver.name!r}: uses the service's AWS permissions",
                "ask an admin to write it",
            )
        if any(isinstance(secret, FromEnvironment) for secret in secrets):
            raise ForbiddenError(
                f"receiver {receiver.name!r}: uses a secret of the service's environment",
                "ask an admin to write it, or give the secret's value",
            )


def _check_addresses(service: Service, receiver: Receiver) -> None:
    policy = egress_policy_of(service.settings)
    for host in receiver.hosts:
        policy.check_literal(host)


def _check_number(session: Session, project: str) -> None:
    number = session.execute(
        select(func.count()).select_from(ReceiverRow).filter_by(project=project)
    ).scalar_one()
    if number >= MOST_RECEIVERS:
        raise ConfigError(f"project {project}: has {number} receivers, which is the limit", "remove some")


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
            _check_stored(receiver, before, field)
    return encrypted


def _check_stored(receiver: Receiver, before: Receiver | None, field: str) -> None:
    secret = None if before is None or type(before) is not type(receiver) else before.secrets().get(field)
    if not isinstance(secret, EncryptedSecret):
        raise ConfigError(
            f"secret {field!r} of receiver {receiver.name!r}: not stored", "give the secret's value"
        )
    assert before is not None
    if before.destination != receiver.destination:
        # Otherwise a caller who may not read the secret could have it sent to their own address.
        raise ConfigError(
            f"secret {field!r} of receiver {receiver.name!r}: stored for another address",
            "give the secret's value together with the new address",
        )
