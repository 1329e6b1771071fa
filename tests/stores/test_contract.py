"""The contract of a store on each provider's server, and what its refusals become."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sdk.store.contract import StoreContract
from tests.stores.servers import Seaweed, StoreServer
from watchstep.errors import ConfigError, MissingStoreError, NotFoundError, StoreError
from watchstep.store.store import Store

KEY_OF_EMULATOR = '{"gcs_base_url": "{endpoint}", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
Acts = dict[str, Callable[[], object]]


@pytest.fixture
def store(url: str) -> Store:
    """An empty store on the server."""
    return Store.open(url)


@pytest.fixture
def unfinished(server: StoreServer) -> Callable[[], list[str]]:
    """A function that lists what interrupted uploads left."""
    return server.unfinished


class TestServers(StoreContract):
    """Each provider's server."""


def acts_of(store: Store) -> Acts:
    """What a store is asked for, by what it says that it could not do."""
    large = 6 * 2**20

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(large))

    return {
        "write 'a'": lambda: store.put("a", b""),
        "write 'b'": lambda: store.create("b", b""),
        "(write|read) 'large'": lambda: store.create_in_parts("large", large, parts()),
        "read 'a'": lambda: store.get("a"),
        "list ''": lambda: list(store.entries()),
        "list 'x/'": lambda: store.folders("x/"),
        "delete 'a'": lambda: store.delete("a"),
    }


def test_a_missing_bucket_is_reported(server: StoreServer) -> None:
    store = Store.open(f"{server.scheme}://nowhere/runs")
    acts = acts_of(store)
    if (
        server.scheme != "s3"
    ):  # the others answer as for a missing object: `size` to write a large one, reads, deletions
        del acts["delete 'a'"]
    if server.scheme == "gs":  # the server answers listings with 500, and reads without a code
        acts = {name: act for name, act in acts.items() if name.startswith("write")}
        with pytest.raises(NotFoundError):
            store.get("a")
    for act in acts.values():
        with pytest.raises(
            MissingStoreError, match=f"store {server.scheme}://nowhere/runs has no such bucket\n  hint"
        ):
            act()


def test_wrong_credentials_are_reported(
    url: str, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.wrong():
        return
    for name, value in server.wrong().items():
        monkeypatch.setenv(name, value)
    for name, act in acts_of(Store.open(url)).items():
        with pytest.raises(StoreError, match=f"store {url}: access denied, cannot {name}"):
            act()


def test_a_denied_write_is_reported(
    lead_to: Callable[[str], Seaweed], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = lead_to("s3")
    url = server.url("denied")
    Store.open(url).put("a", b"1")
    for name, value in server.identity("reader").items():
        monkeypatch.setenv(name, value)
    store = Store.open(url)
    assert store.get("a") == b"1"
    for name, act in acts_of(store).items():
        if name.startswith(("write", "delete")):
            with pytest.raises(
                StoreError, match=rf"store {url}: access denied, cannot {name} \(AccessDenied\)"
            ):
                act()


def test_a_server_that_is_away_is_no_denial(url: str, server: StoreServer) -> None:
    store = Store.open(url)
    store.put("a", b"1")
    with server.away():
        with pytest.raises(StoreError, match=f"store {url}: cannot write 'b'") as refused:
            store.put("b", b"2")
        assert "denied" not in str(refused.value)
        assert not isinstance(refused.value, MissingStoreError)
    store.put("b", b"2")
    assert [store.get(key) for key in "ab"] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("scheme", "variables"),
    [
        ("az", {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": "{endpoint}"}),
        ("gs", {"STORAGE_EMULATOR_HOST": "{address}"}),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": KEY_OF_EMULATOR}),
    ],
    ids=["use_emulator", "address", "service_account"],
)
def test_other_variables_lead_to_a_local_server(
    scheme: str,
    variables: dict[str, str],
    lead_to: Callable[[str], StoreServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = lead_to(scheme)
    for name in server.variables():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        address = server.endpoint.removeprefix("http://")
        monkeypatch.setenv(name, value.replace("{endpoint}", server.endpoint).replace("{address}", address))
    store = Store.open(server.url(f"by-{'-'.join(variables)}"))
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_plain_http_to_another_machine_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://10.0.0.1:1")
    monkeypatch.setenv("WATCHSTEP_ALLOW_HTTP", "1")
    assert not Store.open("gs://b/x").is_local


@pytest.mark.parametrize(
    ("url", "variables", "message"),
    [
        (
            "gs://b/x",
            {"GOOGLE_BASE_URL": "http://10.0.0.1:1"},
            "the endpoint http://10.0.0.1:1 is plain HTTP",
        ),
        ("az://b/x", {"AZURE_STORAGE_ENDPOINT": "http://store.internal"}, "WATCHSTEP_ALLOW_HTTP=1"),
        ("az://b/x", {}, "set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_what_an_environment_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Store.open(url)
