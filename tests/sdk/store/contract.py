"""The contract of every store. Subclasses in test modules run it; the fixture `store` is an empty store,
and `unfinished` lists what an interrupted upload left of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.store.store import ObjectEntry, Store


class StoreContract:
    """What holds of a folder and of every provider."""

    def test_what_was_put_is_read_back(self, store: Store) -> None:
        store.put("a/b", b"one")
        assert store.get("a/b") == b"one"
        assert store.size("a/b") == 3

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"one")
        store.put("a", b"two")
        assert store.get("a") == b"two"

    def test_create_takes_a_free_key_once(self, store: Store) -> None:
        assert store.create("claim", b"first")
        assert not store.create("claim", b"second")
        assert store.get("claim") == b"first"

    def test_a_range_is_read_by_itself(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.get_range("a", 2, 3) == b"234"
        assert store.get_range("a", 8, 100) == b"89"
        with pytest.raises(StoreError, match="cannot read 'a'"):
            store.get_range("a", 10, 1)

    def test_ranges_are_read_at_once(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.get_ranges("a", [(2, 3), (9, 1), (0, 4)]) == [b"234", b"9", b"0123"]
        assert store.get_ranges("a", [(0, 1), (8, 100)]) == [b"0", b"89"]

    def test_a_limit_refuses_a_large_object(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.get("a", limit=10) == b"0123456789"
        with pytest.raises(FormatError, match=r"object .*a has 10 bytes, over the limit of 9"):
            store.get("a", limit=9)

    def test_a_missing_object_is_named(self, store: Store) -> None:
        for read in (
            store.get,
            store.size,
            lambda key: store.get_range(key, 0, 1),
            lambda key: store.get_ranges(key, [(0, 1)]),
        ):
            with pytest.raises(NotFoundError, match="run/nothing: not found"):
                read("run/nothing")

    def test_entries_lists_whole_path_segments(self, store: Store) -> None:
        for key in ("run/a", "run/b/c", "runs/d"):
            store.put(key, b"12")
        assert sorted(store.entries("run/"), key=lambda entry: entry.key) == [
            ObjectEntry("run/a", 2),
            ObjectEntry("run/b/c", 2),
        ]
        assert {entry.key for entry in store.entries()} == {"run/a", "run/b/c", "runs/d"}
        assert list(store.entries("nothing/")) == []

    def test_folders_lists_one_level(self, store: Store) -> None:
        for key in ("p/run2/x/y", "p/run1/z", "p/file", "q/run3/z"):
            store.put(key, b"")
        assert store.folders() == ["p", "q"]
        assert store.folders("p/") == ["run1", "run2"]
        assert store.folders("nothing/") == []

    def test_delete_removes_and_misses_nothing(self, store: Store) -> None:
        store.put("a", b"")
        store.delete("a")
        store.delete("a")
        assert list(store.entries()) == []

    def test_below_an_object_there_is_nothing(self, store: Store) -> None:
        store.put("a", b"1")
        for read in (store.get, store.size, lambda key: store.get_range(key, 0, 1)):
            with pytest.raises(NotFoundError):
                read("a/b")
        store.delete("a/b")
        assert (list(store.entries("a/b/")), store.folders("a/b/")) == ([], [])
        assert store.get("a") == b"1"

    def test_a_child_sees_only_what_is_below_it(self, store: Store) -> None:
        store.put("p/run/a", b"1")
        store.put("p/run-2/a", b"2")
        child = store.child("p").child("run/")
        assert [entry.key for entry in child.entries()] == ["a"]
        assert child.get("a") == b"1"
        child.put("b", b"3")
        assert store.get("p/run/b") == b"3"

    def test_a_location_opens_the_same_place(self, store: Store) -> None:
        store.child("p/run").put("a", b"1")
        assert Store.open(store.child("p/run").location).get("a") == b"1"
        assert store.child("p").location == f"{store.location}/p"

    def test_check_writable_leaves_nothing_behind(self, store: Store) -> None:
        store.check_writable()
        assert list(store.entries()) == []

    @pytest.mark.parametrize("key", ["../outside", "a//b", "a/../../b"])
    def test_no_key_leaves_the_store(self, store: Store, key: str) -> None:
        inner = store.child("inner")
        for act in (inner.get, inner.delete, lambda key: inner.put(key, b"")):
            with pytest.raises(StoreError):
                act(key)
        assert list(store.entries()) == []

    @pytest.mark.parametrize("sizes", [[], [0, 0], [5], [3, 0, 2**20, 7], [6 * 2**20, 1, 7 * 2**20]])
    def test_an_object_in_parts_is_read_back(self, store: Store, sizes: list[int]) -> None:
        parts = [bytes([place]) * size for place, size in enumerate(sizes)]
        assert store.create_in_parts("a", sum(sizes), map(memoryview, parts))
        assert store.get("a") == b"".join(parts)
        assert not store.create_in_parts("a", 5, iter([memoryview(b"other")]))
        assert store.get("a") == b"".join(parts)

    @pytest.mark.parametrize("complete_parts", [0, 1, 3])
    def test_an_upload_that_is_interrupted_leaves_nothing(
        self, store: Store, unfinished: Callable[[], list[str]], complete_parts: int
    ) -> None:
        def interrupted() -> Iterator[memoryview]:
            for _ in range(complete_parts):
                yield memoryview(bytes(5 * 2**20))
            yield memoryview(b"a bit")
            raise ConnectionError("the line is cut")

        with pytest.raises(StoreError, match=r"cannot write 'run/a' \(the line is cut\)"):
            store.create_in_parts("run/a", 20 * 2**20, interrupted())
        assert list(store.entries()) == []
        assert unfinished() == []
        whole = memoryview(bytes(6 * 2**20))
        assert store.create_in_parts("run/a", len(whole), iter([whole]))
        assert store.size("run/a") == len(whole)

    @pytest.mark.parametrize(
        "name", ["NoSuchBucket", "status-code-403", "os-error-20", "AccessDenied", "169.254.169.254"]
    )
    def test_names_are_never_taken_for_errors(self, store: Store, name: str) -> None:
        run = store.child(f"{name}/{name}")
        with pytest.raises(NotFoundError, match="not found"):
            run.get(name)
        assert run.create(name, b"1")
        assert run.get(name) == b"1"
        assert [entry.key for entry in run.entries()] == [name]
        with pytest.raises(StoreError, match=f"cannot read '{name}'") as refused:
            run.get_range(name, 5, 1)
        assert type(refused.value) is StoreError
