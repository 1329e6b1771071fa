"""The contract of a store on each provider's server."""

from __future__ import annotations

from tests.stores.servers import StoreServer
from watchstep.store.store import Store


def test_smoke(url: str, server: StoreServer) -> None:
    store = Store.open(url)
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert not store.create("a", b"2")
