"""The spill folder: where it is, whose it is, and what is read back from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.capture.identity import Identity
from watchstep.capture.outgoing import Outgoing, Place
from watchstep.capture.spill import spill_root
from watchstep.capture.spill_folder import About, SpillFolder
from watchstep.documents import AttemptDocument, EndDocument, RunDocument
from watchstep.errors import FormatError
from watchstep.layout import WriterId

ABOUT = About(
    "s3://bucket/runs",
    Identity("p", "r", "a", 3, 8, "n"),
    RunDocument("p", "r", 1, rules=({"rule": "nan_or_inf"},)),
    AttemptDocument("a", 2, 8),
)
END = EndDocument(3, "failed", 7, 9, 2, "", "SIGTERM")

numbers = st.integers(0, 10**18 - 1)
places = st.builds(Place, numbers, numbers, numbers, numbers)


@given(places)
def test_a_place_is_read_back_from_its_name(place: Place) -> None:
    assert Place.parse(place.name) == place


@given(st.text())
def test_other_names_are_no_places(name: str) -> None:
    place = Place.parse(name)
    assert place is None or place.name == name


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    items = [Outgoing(Place(seq, seq, seq, 1), bytes([seq])) for seq in (11, 2, 100)]
    for item in items:
        folder.add(item)
    folder.add_end(END)
    (folder.path / ".part-left-behind").touch()
    (folder.path / "0000000001-segment-x").touch()
    assert [folder.read(held) for held in folder.entries()] == sorted(items, key=lambda one: one.place.seq)
    assert (folder.about(), folder.end()) == (ABOUT, END)


def test_the_writer_that_was_claimed_is_kept(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    claimed = About(**{**vars(ABOUT), "writer": WriterId("a", "n", "w3")})
    folder.describe(claimed)
    assert folder.about() == claimed


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"identity": {"project": "../x"}}', b"\xff"])
def test_a_description_that_is_none_is_told(tmp_path: Path, damage: bytes) -> None:
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


def test_one_at_a_time_holds_it(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path, "r", ABOUT)
    assert SpillFolder.take(folder.path) is None
    folder.let_go()
    taken = SpillFolder.take(folder.path)
    assert taken is not None
    taken.remove()
    assert SpillFolder.take(folder.path) is None
    assert not folder.path.exists()


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    folder = SpillFolder.make(tmp_path / "root", "r", ABOUT)
    folder.add(Outgoing(Place(0, 0, 0, 1), b"x"))
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
    SpillFolder.make(root, "r", ABOUT)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spill_root() == Path(os.environ["WATCHSTEP_SPILL"])
    monkeypatch.delenv("WATCHSTEP_SPILL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert spill_root() == tmp_path / "watchstep" / "spill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert spill_root() == tmp_path / ".cache" / "watchstep" / "spill"
    monkeypatch.setenv("HOME", "/nowhere")
    assert spill_root().name == f"watchstep-spill-{os.getuid()}"
