from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.sdk.store.contract import StoreContract
from tests.sdk.store.parts_server import PartsServer
from watchstep.errors import ConfigError, MissingStoreError, NotFoundError, StoreError
from watchstep.platform.folders import HOME
from watchstep.store.known_stores import HOME_NOTE, note_in_home
from watchstep.store.local import MARKER, StoreIdentity, new_store
from watchstep.store.store import Store

# Stores in folders, and what needs no server of a provider.


@pytest.fixture
def unfinished(folder_store: Store) -> Callable[[], list[str]]:
    """A function that lists what no listing shows."""
    folder = Path(folder_store.location)
    return lambda: [str(path) for path in folder.rglob("*") if path.is_file()]


class TestFolder(StoreContract):
    """A folder. Servers of S3, Azure and GCS are in tests/stores."""


def test_in_a_folder_nothing_is_written_below_an_object(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.put("a", b"1")
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="is an object already") as refused:
            write("a/b", b"2")
        assert not isinstance(refused.value, NotFoundError)


@pytest.mark.parametrize("name", ["plain", "with space", "schrittmaß", "100%", "a#b?c"])
def test_a_folder_of_any_name_opens_by_path_url_and_location(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    store = Store.open(folder, create=True)
    store.put("a", b"1")
    assert (folder / "a").read_bytes() == b"1"
    assert store.is_local
    assert store.location == str(folder)
    assert Store.open(folder.as_uri()).get("a") == b"1"
    assert Store.open(store.location).get("a") == b"1"
    assert Store.open(store.url).get("a") == b"1"


def test_a_relative_path_and_a_home_path_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    assert Store.open("runs").location == str(tmp_path / "runs")
    assert Store.open("~/runs").location == str(tmp_path / "runs")


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingStoreError, match=r"nowhere does not exist\n  hint: check the path"):
        Store.open(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot create the folder \(Not a directory\)"):
        Store.open(tmp_path / "file" / "runs", create=True)
    with pytest.raises(StoreError, match="cannot create the folder"):
        Store.open(tmp_path / "file", create=True)


def test_a_folder_that_cannot_be_written_is_reported(folder_store: Store) -> None:
    folder_store.put("file", b"")
    with pytest.raises(StoreError, match="cannot write 'file/object'"):
        folder_store.put("file/object", b"")
    with pytest.raises(StoreError, match="cannot write"):
        folder_store.child("file").check_writable()
    with pytest.raises(StoreError, match="cannot write"):
        folder_store.child("file").create("object", b"")


def test_a_part_that_the_server_refuses_ends_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    with PartsServer(good_parts=1).serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        store = Store.open("s3://runs")
        parts = [bytes(5 * 2**20)] * 3
        with pytest.raises(StoreError, match="cannot write 'a'"):
            store.create_in_parts("a", sum(map(len, parts)), map(memoryview, parts))
        assert server.began == 1
        assert server.aborted == 1
        assert server.completed == 0


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.put("p/run/a", b"1")
    store.put("p/run/empty", b"")
    os.mkfifo(tmp_path / "p" / "run" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "p" / "run" / "socket"))
    run = store.child("p/run")
    for key in ("pipe", "socket"):
        for read in (
            run.get,
            run.size,
            lambda key: run.get_range(key, 0, 1),
            lambda key: run.get_ranges(key, [(0, 1)]),
        ):
            with pytest.raises(StoreError, match=f"p/run/{key} is not a regular file") as refused:
                read(key)
            assert not isinstance(refused.value, NotFoundError)
    assert {entry.key for entry in run.entries()} == {"a", "empty"}
    assert {entry.key for entry in store.entries("p/")} == {"p/run/a", "p/run/empty"}


def test_a_folder_is_no_object(folder_store: Store) -> None:
    folder_store.put("p/a", b"1")
    for read in (folder_store.get, folder_store.size, lambda key: folder_store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError):
            read("p")
        with pytest.raises(StoreError, match="invalid key"):
            read("p/../p/a")


def test_a_denied_folder_is_reported_as_denied(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("obstore.put", deny)
    with pytest.raises(StoreError, match=r"access denied, cannot write 'a'\n  hint: check the credentials"):
        folder_store.put("a", b"")


def test_a_half_written_file_is_never_visible(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(folder_store.location)
    folder_store.put("run/old", b"old")
    seen: list[set[str]] = []

    class Slow:
        """Bytes in pieces, with a check of the folder between them."""

        def __iter__(self) -> Slow:
            self.left = 40
            return self

        def __next__(self) -> bytes:
            if not self.left:
                raise ConnectionError("the writer died")
            self.left -= 1
            seen.append({path.name for path in folder.rglob("*") if "#" not in path.name})
            return bytes(1024 * 1024)

    with pytest.raises(StoreError, match="cannot write 'run/new'"):
        folder_store.put("run/new", Slow())  # type: ignore[arg-type]
    assert seen
    assert set.union(*seen) == {"run", "old"}
    assert not (folder / "run" / "new").exists()
    # What a killed writer leaves behind is a temporary name, and no listing shows it.
    (folder / "run" / "new#1").write_bytes(b"half")
    assert {entry.key for entry in folder_store.entries()} == {"run/old"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "no URL"),
        ("ftp://host/runs", "unknown scheme 'ftp'"),
        ("http://host/runs", "unknown scheme 'http'"),
        ("file://runs", "has no absolute path"),
        ("file:", "has no absolute path"),
        ("s3://", "s3://"),
    ],
)
def test_a_url_that_names_no_store_is_reported(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Store.open(url)
    assert caught.value.hint


def test_a_server_that_does_not_answer_is_not_taken_for_a_denial(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = Store.open("s3://runs-403/x")
    with pytest.raises(StoreError, match="cannot write '0000000403-401'") as caught:
        store.put("0000000403-401", b"")
    assert "denied" not in str(caught.value)


def test_without_boto3_obstore_finds_the_credentials_itself(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.put("a", b"1")
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert Store.open(s3_store.location).get("a") == b"1"


@pytest.mark.parametrize("endpoint", ["", "https://127.0.0.1:9"])
def test_opening_needs_no_region_credentials_or_answer(
    s3: S3, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    assert not Store.open("s3://runs/x").is_local


@pytest.mark.parametrize(
    ("url", "host", "hint"),
    [
        ("s3://runs/x", "169.254.169.254", "set AWS_ACCESS_KEY_ID"),
        ("gs://runs/x", "metadata.google.internal", "set GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://runs/x", "169.254.169.254", "set AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_missing_credentials_are_reported(
    monkeypatch: pytest.MonkeyPatch, url: str, host: str, hint: str
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise OSError(f"Error performing PUT http://{host}/latest/api/token in 5s")

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setattr("obstore.put", ask)
    with pytest.raises(StoreError, match=f"{url}: no credentials found, cannot write 'a'\n  hint: {hint}"):
        Store.open(url).put("a", b"")


def test_expired_credentials_are_reported(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(BaseHTTPRequestHandler):
        """AWS's answer: 400, which moto and other servers do not give."""

        def do_PUT(self) -> None:
            body = (
                b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            )
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Expired) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(
            StoreError, match=r"the credentials have expired, cannot write 'a' \(ExpiredToken\)"
        ):
            Store.open("s3://runs/x").put("a", b"1")
        server.shutdown()


def test_an_error_without_words_is_named_by_its_type(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("obstore.put", fail)
    with pytest.raises(StoreError, match=r"cannot write 'a' \(MemoryError\)"):
        s3_store.put("a", b"")


def test_a_folder_whose_name_is_no_key_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "a\nb", "\x1b[2Jevil"):
        (tmp_path / "p" / name).mkdir(parents=True)
    store = Store.open(tmp_path)
    assert store.folders("p/") == store.folders("p/") == ["good"]
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    assert "'\\x1b[2Jevil' in" in messages[0]


# Stores that were seen before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a store, with an empty cache and an empty home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path / "disk" / "runs"


def opened(folder: Path) -> StoreIdentity:
    identity = StoreIdentity()
    Store.open(folder, create=True, identity=identity).put("p/r/run.json", b"{}")
    return identity


def left_alone(folder: Path, _: str) -> None:
    """No process knows more than the folder shows."""


def noted(folder: Path, identity: str) -> None:
    """A service with its home elsewhere was started on the store, and runs no more."""
    note_in_home(folder.parent.parent / "home", str(folder), identity)


def unmounted(folder: Path, _: str) -> None:
    """The store was on a disk whose mount point has no disk now."""
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "mount": str(folder.parent)}))


def missing(folder: Path) -> str:
    return ""


def empty(folder: Path) -> str:
    folder.mkdir()
    return ""


def replaced(folder: Path) -> str:
    return new_store(folder)


@pytest.mark.parametrize("now", [missing, empty, replaced])
@pytest.mark.parametrize(
    ("evidence", "uses", "waits"),
    [(left_alone, False, False), (left_alone, True, True), (noted, False, True), (unmounted, False, True)],
    ids=["unknown", "in-use", "noted", "unmounted"],
)
def test_a_store_that_is_away_is_waited_for_and_any_other_path_gets_a_new_store(
    folder: Path,
    now: Callable[[Path], str],
    evidence: Callable[[Path, str], None],
    uses: bool,
    waits: bool,
) -> None:
    user = opened(folder)
    evidence(folder, user.id)
    if not uses:
        user.release()
    folder.rename(folder.parent / "away")
    other = now(folder)
    content = sorted(folder.rglob("*")) if folder.exists() else None
    later = StoreIdentity()
    if not waits:
        Store.open(folder, create=True, identity=later).put("p/r/run.json", b"{}")
        assert later.id == (folder / MARKER).read_text().strip() != user.id
        assert not other or later.id == other
        return
    with pytest.raises(MissingStoreError, match=r"no longer exists|another store"):
        Store.open(folder, create=True, identity=later).put("p/r/run.json", b"{}")
    assert later.id == user.id
    assert (sorted(folder.rglob("*")) if folder.exists() else None) == content
    if folder.exists():
        folder.rename(folder.parent / "aside")
    (folder.parent / "away").rename(folder)
    Store.open(folder, create=True, identity=later).put("p/r2/run.json", b"{}")
    assert (folder / "p" / "r2" / "run.json").exists()


def test_a_new_folder_needs_neither_a_cache_nor_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv(HOME)
    monkeypatch.setenv("HOME", str(folder.parent / "no-home"))
    assert opened(folder).id == (folder / MARKER).read_text().strip()


def test_a_note_in_the_home_that_is_no_file_of_the_user_is_ignored(folder: Path) -> None:
    noted(folder, "0" * 32)
    note = folder.parent.parent / "home" / HOME_NOTE
    note.rename(note.with_name("other"))
    note.symlink_to("other")
    assert opened(folder).id != "0" * 32
    note.unlink()
    os.mkfifo(note)
    assert opened(folder).id != "0" * 32


def test_damaged_records_are_ignored(folder: Path) -> None:
    opened(folder).release()
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    folder.rename(folder.parent / "away")
    for content in (b"", b"{", b"[]", b'{"id": 1, "mount": ""}', b"\xff", b"[" * 65536):
        record.write_bytes(content)
        assert opened(folder).id
        for path in (folder / MARKER, folder / "p" / "r" / "run.json"):
            path.unlink()


def test_ranks_that_look_at_the_same_time_do_not_take_each_other_for_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(folder).release()
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    folder.rename(folder.parent / "removed")
    with record.open() as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(another, fcntl.LOCK_UN))
        assert opened(folder).id == (folder / MARKER).read_text().strip()


def test_a_service_names_the_store_after_another_was_opened(folder: Path) -> None:
    identity = opened(folder)
    store = Store.open(folder, identity=identity)
    assert identity.require("0" * 32)
    assert not identity.require("0" * 32)
    with pytest.raises(MissingStoreError, match="another store"):
        store.put("p/r/a", b"")
    with pytest.raises(StoreError, match="is not new, its id is"):
        new_store(folder)
