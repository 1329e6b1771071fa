"""Stores in folders: confined to them, and vanished."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import FormatError, MissingStoreError, NotFoundError, StoreError, WatchstepError
from watchstep.store.local import MARKER, StoreIdentity
from watchstep.store.store import Store
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.confined_folder import ConfinedFolder
from watchstep_services.stores.opening import Stores

SECRET = b"another tenant's"
KEYS = st.lists(st.sampled_from(["a", "b", "c.json", "x-1"]), min_size=1, max_size=3).map("/".join)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    return tmp_path / "outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def comparable(what: object) -> object:
    try:
        return what() if callable(what) else what
    except NotFoundError:
        return "missing"
    except StoreError:
        return "refused"
    except FormatError:
        return "over the limit"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "create", "delete"]), KEYS, st.binary(max_size=5)), max_size=12
    ),
    prefix=KEYS,
    start=st.integers(0, 6),
    length=st.integers(1, 6),
)
def test_a_confined_folder_answers_as_the_plain_store(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, bytes]],
    prefix: str,
    start: int,
    length: int,
) -> None:
    folders = [tmp_path_factory.mktemp("s") for _ in range(2)]
    stores = [Store.open(folders[0]), ConfinedFolder(folders[1])]
    seen: list[list[object]] = [[], []]
    for store, answers in zip(stores, seen, strict=True):
        for verb, key, data in steps:
            arguments = (key,) if verb == "delete" else (key, data)
            answers.append(comparable(lambda: getattr(store, verb)(*arguments)))  # noqa: B023 - called at once
        inner = store.child("a")
        for key in sorted({key for _, key, _ in steps}):
            answers.append(comparable(lambda: store.get(key)))  # noqa: B023
            answers.append(comparable(lambda: store.get(key, limit=2)))  # noqa: B023
            answers.append(comparable(lambda: store.size(key)))  # noqa: B023
            answers.append(comparable(lambda: store.get_range(key, start, length)))  # noqa: B023
        answers.append(sorted(entry.key for entry in store.entries(f"{prefix}/")))
        answers.append(sorted(entry.key for entry in inner.entries()))
        answers.extend(comparable(ask) for ask in (store.folders, lambda: store.folders(f"{prefix}/")))  # noqa: B023
    assert seen[0] == seen[1]


LINKS = ["secret", "secret/x", "linked/secret", "a/linked/secret", "a/b/secret"]


@pytest.mark.parametrize("key", LINKS)
def test_links_are_not_followed(folder: Path, outside: Path, key: str) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "secret").symlink_to(outside / "secret")
    (folder / "linked").symlink_to(outside)
    (folder / "a" / "linked").symlink_to("../../outside")
    (folder / "a" / "b" / "secret").symlink_to(outside / "secret")
    store = ConfinedFolder(folder)
    for read in (store.get, store.size, lambda name: store.get_range(name, 0, 3), lambda name: store.get_ranges(name, [(0, 3)])):  # fmt: skip
        with pytest.raises(NotFoundError) as error:
            read(key)
        assert SECRET.decode() not in str(error.value)
    assert list(store.entries()) == []
    assert (store.folders(), store.folders("a/")) == (["a"], ["b"])
    assert list(store.entries("linked/")) == []
    comparable(lambda: store.put(key, b"mine"))
    comparable(lambda: store.create(key, b"mine"))
    comparable(lambda: store.delete(key))
    assert (outside / "secret").read_bytes() == SECRET
    assert names(outside) == ["secret"]


def test_empty_folders_are_removed_and_links_are_not_followed(folder: Path, outside: Path) -> None:
    (outside / "empty").mkdir()
    for name in ("run/tensors/a/b", "run/stats/full"):
        (folder / name).mkdir(parents=True)
    (folder / "run/stats/full/object").write_bytes(b"")
    (folder / "run/tensors/a/link").symlink_to(outside)
    (folder / "run/bundles").symlink_to(outside)
    (folder / "other").symlink_to(outside)
    run = ConfinedFolder(folder, "run/")
    for prefix in ("bundles/", "tensors/", "nothing/", ""):
        run.remove_empty_folders(prefix)
    ConfinedFolder(folder, "other/").remove_empty_folders("")
    assert names(outside) == ["empty", "secret"]
    assert names(folder / "run") == ["bundles", "stats", "tensors"]
    assert names(folder / "run/tensors/a") == ["link"]


def test_writing_over_a_link_replaces_the_link(folder: Path, outside: Path) -> None:
    (folder / "control.json").symlink_to(outside / "secret")
    store = ConfinedFolder(folder)
    assert store.create("control.json", b"mine") is False
    store.put("control.json", b"mine")
    assert not (folder / "control.json").is_symlink()
    assert (outside / "secret").read_bytes() == SECRET


@given(key=st.one_of(st.text("./ab%\0\\", max_size=8), st.sampled_from(["..", "../outside/secret", "a/../../outside/secret", "/etc/passwd", "%2e%2e/outside/secret", "."])))  # fmt: skip
def test_no_key_leads_out(tmp_path: Path, key: str) -> None:
    for name in ("store", "outside"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    store = ConfinedFolder(tmp_path / "store")
    for what in (lambda: store.get(key), lambda: store.put(key, b"x"), lambda: store.create(key, b"x"), lambda: store.delete(key)):  # fmt: skip
        with contextlib.suppress(WatchstepError):
            assert what() != SECRET
    assert names(tmp_path / "outside") == ["secret"]
    assert (tmp_path / "outside" / "secret").read_bytes() == SECRET
    assert sorted(path for path in names(tmp_path) if path in {"store", "outside"}) == [
        "outside",
        "store",
    ]


def test_a_pipe_is_not_an_object_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    store = ConfinedFolder(folder)
    with pytest.raises(NotFoundError):
        store.get("pipe")
    assert list(store.entries()) == []


def test_folders_in_each_other_have_an_end(folder: Path) -> None:
    deep = folder
    for _ in range(60):
        deep /= "d"
        deep.mkdir()
    (deep / "x").write_bytes(b"x")
    assert list(ConfinedFolder(folder).entries()) == []


def test_swapping_a_folder_and_a_link_never_exposes_other_folders(folder: Path, outside: Path) -> None:
    """Whoever may write exchanges a folder for a link again and again, while it is read."""
    (folder / "real").mkdir()
    (folder / "real" / "secret").write_bytes(b"own")
    (folder / "link").symlink_to(outside)
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            for name in ("real", "link"):
                for place in ("way", "at"):
                    (folder / name).rename(folder / place)
                    (folder / place).rename(folder / name)

    thread = threading.Thread(target=exchange)
    thread.start()
    store = ConfinedFolder(folder)
    try:
        for _ in range(300):
            for key in ("at/secret", "way/secret"):
                assert comparable(lambda: store.get(key)) in (b"own", "missing", "refused")  # noqa: B023
            assert not [entry for entry in store.entries() if entry.size == len(SECRET)]
    finally:
        done.set()
        thread.join()


def test_of_many_that_create_one_wins(folder: Path) -> None:
    store = ConfinedFolder(folder)
    won: list[int] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        if store.create("a/claim", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get("a/claim")] == [str(number).encode() for number in won]
    assert names(folder / "a") == ["claim"]


def test_a_sibling_and_a_child_are_confined_too(folder: Path, outside: Path) -> None:
    store = ConfinedFolder(folder).child("vision/mine/")
    store.sibling("good").put("at/object", b"own")
    (folder / "vision" / "good" / "way").symlink_to(outside)
    for other in (store.sibling("good"), ConfinedFolder(folder).child("vision").child("good")):
        assert isinstance(other, ConfinedFolder)
        assert [entry.key for entry in other.entries()] == ["at/object"]
        assert other.get_range("at/object", 0, 3) == b"own"
        assert comparable(lambda: other.get_range("way/secret", 0, 5)) in ("missing", "refused")  # noqa: B023
    assert [entry.key for entry in store.entries()] == []


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A store that a recorder has written to."""
    recorded = Store.open(tmp_path / "disk" / "runs", create=True, identity=StoreIdentity())
    recorded.put("vision/r/run.json", b"{}")
    return tmp_path / "disk" / "runs"


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture(params=["own", "project"])
def vanishing(disk: Path, stores: Stores, request: pytest.FixtureRequest) -> Store:
    if request.param == "own":
        return stores.open(str(disk))
    return stores.of(StorePlace(1, 1, StoreRegistration(str(disk)), "", "vision"))


@pytest.mark.parametrize("mount_point", [False, True])
def test_all_is_missing_until_it_is_back(disk: Path, vanishing: Store, *, mount_point: bool) -> None:
    run = vanishing.child("vision/r")
    assert run.get("run.json") == b"{}"
    assert [entry.key for entry in vanishing.entries()] == ["vision/r/run.json"]
    elsewhere = disk.rename(disk.parent / "elsewhere")
    if mount_point:
        disk.mkdir()
    acts: tuple[Callable[[], object], ...] = (
        lambda: run.get("run.json"),
        lambda: run.put("control.json", b"{}"),
        lambda: run.create("control.json", b"{}"),
        lambda: run.delete("run.json"),
        lambda: list(run.entries()),
        vanishing.folders,
    )
    for act in acts:
        with pytest.raises(MissingStoreError, match=f"store {disk}: "):
            act()
    if mount_point:
        disk.rmdir()
    assert not disk.exists()
    elsewhere.rename(disk)
    assert run.create("control.json", b"{}")
    assert run.get("run.json") == b"{}"
    with pytest.raises(NotFoundError):
        run.get("nothing.json")


def test_a_store_that_is_opened_again_is_still_the_same(disk: Path, stores: Stores) -> None:
    stores.open(str(disk))
    disk.rename(disk.parent / "elsewhere")
    disk.mkdir()
    with pytest.raises(MissingStoreError, match=r"no longer exists|another store"):
        stores.of(StorePlace(1, 1, StoreRegistration(str(disk)), "", "vision"))


def test_a_marker_that_comes_later_counts_from_then_on(tmp_path: Path, stores: Stores) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    vanishing = stores.open(str(disk))
    assert vanishing.folders() == []
    assert not (disk / MARKER).exists()
    Store.open(disk, create=True, identity=StoreIdentity()).put("vision/r/run.json", b"{}")
    assert vanishing.folders() == ["vision"]
    disk.rename(tmp_path / "elsewhere")
    disk.mkdir()
    with pytest.raises(MissingStoreError):
        vanishing.folders()
