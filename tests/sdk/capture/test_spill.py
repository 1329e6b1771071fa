"""The spill folder: its location, its owner, and its contents."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.capture.identity import Identity
from watchstep.capture.upload.outgoing import Outgoing, SegmentPlace
from watchstep.capture.upload.spill import SpillFolder, SpillOwner, spill_roots
from watchstep.capture.upload.uploader import named_spill_folders, spill_folders, sync
from watchstep.errors import FormatError
from watchstep.format.documents import AttemptDocument, EndDocument, RunDocument
from watchstep.format.layout import WriterId

ABOUT = SpillOwner(
    "s3://bucket/runs",
    Identity("p", "r", "a", 3, 8, "n"),
    RunDocument("p", "r", 1, rules=({"rule": "nan_or_inf"},)),
    AttemptDocument("a", 2, 8),
)
END = EndDocument(3, "failed", 7, 9, 2, "", "SIGTERM")


def released(root: Path) -> SpillFolder:
    """A folder that no process uses."""
    folder = SpillFolder.make(root, "r", ABOUT)
    folder.release()
    return folder


numbers = st.integers(0, 10**18 - 1)
places = st.builds(SegmentPlace, numbers, numbers, numbers, numbers)


@given(places)
def test_a_place_is_read_back_from_its_name(place: SegmentPlace) -> None:
    assert SegmentPlace.parse(place.name) == place


@given(st.text())
def test_other_names_are_no_places(name: str) -> None:
    place = SegmentPlace.parse(name)
    assert place is None or place.name == name


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    items = [Outgoing(SegmentPlace(seq, seq, seq, 1), bytes([seq])) for seq in (11, 2, 100)]
    for item in items:
        folder.add(item)
    folder.add_end(END)
    (folder.path / ".part-left-behind").touch()
    (folder.path / "0000000001-segment-x").touch()
    assert [folder.read(entry) for entry in folder.entries()] == sorted(
        items, key=lambda outgoing: outgoing.place.seq
    )
    assert (folder.about(), folder.end()) == (ABOUT, END)


def test_the_writer_that_was_claimed_is_retained(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    claimed = SpillOwner(**{**vars(ABOUT), "writer": WriterId("a", "n", "w3")})
    folder.describe(claimed)
    assert folder.about() == claimed


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"identity": {"project": "../x"}}', b"\xff"])
def test_an_invalid_description_is_reported(tmp_path: Path, damage: bytes) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    (folder.path / "spill.json").write_bytes(damage)
    with pytest.raises(FormatError):
        folder.about()


def test_names_that_would_leave_their_place_are_refused(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    data = ABOUT.encode().replace(b'"run": "r"', b'"run": "../other"')
    (folder.path / "spill.json").write_bytes(data)
    with pytest.raises(FormatError, match="cannot be used"):
        folder.about()


def test_one_process_at_a_time_locks_the_folder(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    assert SpillFolder.take(folder.path) is None
    folder.release()
    taken = SpillFolder.take(folder.path)
    assert taken is not None
    taken.remove()
    assert SpillFolder.take(folder.path) is None
    assert not folder.path.exists()


def test_only_the_owner_has_access(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    folder.add(Outgoing(SegmentPlace(0, 0, 0, 1), b"x"))
    modes = {entry.stat().st_mode & 0o077 for entry in [folder.path, *folder.path.iterdir()]}
    assert modes == {0}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_root_that_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        SpillFolder.make(root, "r", ABOUT)
    root.chmod(0o1777)
    with pytest.raises(PermissionError, match="another user"):
        SpillFolder.make(root, "r", ABOUT)
    os.chown(root, 0, 0)
    SpillFolder.make(root, "r", ABOUT)


def test_a_root_with_files_of_a_spill_folder_is_used_only_if_named(tmp_path: Path) -> None:
    folder = released(tmp_path / "root")
    within = released(folder.path)
    assert spill_folders(folder.path) == [within.path]
    assert named_spill_folders(folder.path) == [folder.path]
    assert named_spill_folders(folder.path.parent) == [folder.path]


def test_a_folder_that_others_may_write_to_is_not_uploaded(tmp_path: Path) -> None:
    folder = released(tmp_path / "root")
    folder.path.chmod(0o777)
    assert named_spill_folders(folder.path) == [folder.path]
    assert "not exclusively this user's" in sync(folder.path).why
    within = released(tmp_path)
    within.path.rename(folder.path / "within")
    assert named_spill_folders(folder.path) == [folder.path / "within"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_uploaded(tmp_path: Path) -> None:
    folder = released(tmp_path)
    assert spill_folders(tmp_path) == [folder.path]
    os.chown(folder.path, 65534, 65534)
    assert spill_folders(tmp_path) == []
    assert named_spill_folders(folder.path) == [folder.path]
    assert "owner 65534" in sync(folder.path).why
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["lock", "spill.json"]


def test_a_link_to_a_spill_folder_is_ignored(tmp_path: Path) -> None:
    folder = released(tmp_path / "root")
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert spill_folders(tmp_path) == []
    assert "cannot be opened" in sync(link).why


def test_an_object_exchanged_for_a_link_after_the_listing_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of this user alone")
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    folder.add(Outgoing(SegmentPlace(0, 0, 0, 1), b"x"))
    (entry,) = folder.entries()
    (folder.path / entry.name).unlink()
    (folder.path / entry.name).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        folder.read(entry)


def test_a_folder_exchanged_for_a_link_is_not_read_or_written(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    spilled = folder.add(Outgoing(SegmentPlace(0, 0, 0, 1), b"x"))
    folder.path.rename(tmp_path / "elsewhere")
    folder.path.symlink_to(tmp_path / "elsewhere")
    for use in (
        folder.entries,
        lambda: folder.read(spilled),
        lambda: folder.drop(spilled.name),
        lambda: folder.describe(ABOUT),
    ):
        with pytest.raises(NotADirectoryError):
            use()
    assert (tmp_path / "elsewhere" / spilled.name).read_bytes() == b"x"


@pytest.mark.parametrize("name", ["spill.json", "end.json", "lock", "0000000000-segment-0-0-0-1"])
@pytest.mark.parametrize(
    ("expose", "reason"),
    [
        pytest.param(
            lambda file: os.chown(file, 65534, 65534),
            "65534",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user"),
        ),
        (lambda file: file.chmod(0o666), "mode 0666"),
    ],
    ids=["of another user", "that others may write to"],
)
def test_a_file_that_is_not_exclusively_this_users_is_not_used(
    tmp_path: Path, name: str, expose: Callable[[Path], None], reason: str
) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    spilled = folder.add(Outgoing(SegmentPlace(0, 0, 0, 1), b"x"))
    folder.add_end(END)
    folder.release()
    assert (folder.path / name).is_file()
    expose(folder.path / name)

    def use() -> None:
        taken = SpillFolder.take(folder.path)
        assert taken is not None
        try:
            taken.about()
            taken.end()
            taken.read(spilled)
        finally:
            taken.release()

    with pytest.raises((PermissionError, FormatError), match=reason):
        use()


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spill_roots() == [Path(os.environ["WATCHSTEP_SPILL"])]
    monkeypatch.delenv("WATCHSTEP_SPILL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert spill_roots()[0] == tmp_path / "watchstep" / "spill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert spill_roots()[0] == tmp_path / ".cache" / "watchstep" / "spill"
    monkeypatch.setenv("HOME", "/nowhere")
    assert spill_roots()[0].name == f"watchstep-spill-{os.getuid()}"
