"""Try a place: what the service must be able to do there, step by step, with the store's own reason where it cannot."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from watchstep.errors import StoreError, WatchstepError
from watchstep.store.store import Store
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.opening import open_place
from watchstep_services.stores.policies import project_policy
from watchstep_services.stores.role import RoleCredentials

TRIED = ".watchstep-check"
"""In place of a project: no project can have the name, so nothing of one is touched."""


@dataclass(frozen=True)
class TriedStep:
    """One thing that was tried.

    Attributes:
        name: what: ``role``, ``list``, ``write``, ``read``, ``create_once`` or ``delete``.
        ok: whether it can be done.
        detail: what is wrong; empty where nothing is.
        hint: what to do about it.
    """

    name: str
    ok: bool
    detail: str = ""
    hint: str = ""


def check_store(registration: StoreRegistration, prefix: str = "", project: str = TRIED) -> list[TriedStep]:
    """Try a store as a project would use it. What follows from a step that failed is not tried."""
    place = StorePlace(0, 0, registration, prefix, project)
    done: list[TriedStep] = []
    opened: list[Store] = []
    key = f"{project}/{TRIED}-{secrets.token_hex(4)}"

    def tried(name: str, what: Callable[[], object]) -> bool:
        try:
            what()
        except WatchstepError as error:
            done.append(TriedStep(name, False, error.what, error.hint))
            return False
        done.append(TriedStep(name, True))
        return True

    if registration.role_arn and not tried(
        "role", RoleCredentials(registration, project_policy(place), "watchstep-check")
    ):
        return done
    if not tried("list", lambda: opened.append(_listed(place))):
        return done
    (store,) = opened
    if not tried("write", lambda: store.put(key, b"watchstep")):
        return done
    tried("read", lambda: _read(store, key))
    tried("create_once", lambda: _create_once(store, key))
    tried("delete", lambda: store.delete(key))
    return done


def failed(checked: list[TriedStep]) -> TriedStep | None:
    """The first thing that cannot be done."""
    return next((step for step in checked if not step.ok), None)


def _listed(place: StorePlace) -> Store:
    store = open_place(place)
    store.folders(f"{place.project}/")
    return store


def _read(store: Store, key: str) -> None:
    if store.get(key, limit=100) != b"watchstep":
        raise StoreError(f"object {key}: another than was written", "see what stands between, as a cache")


def _create_once(store: Store, key: str) -> None:
    if store.create(key, b"again"):
        raise StoreError(
            f"store {store.url}: lets an object be created twice", "use a service that honours If-None-Match"
        )
