"""``watchstep sync`` uploads what recorders left on this machine because their store was unavailable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from watchstep.capture.upload.spill import SPILL, spill_roots
from watchstep.capture.upload.uploader import (
    Synced,
    create_accepted,
    named_spill_folders,
    spill_folders,
    sync,
)
from watchstep.errors import ConfigError
from watchstep.platform.folders import absolute_path
from watchstep.platform.terminal_text import printable
from watchstep.store import known_stores
from watchstep.store.local import MARKER

NEW_STORE = "new"
"""Value of ``--accept-store`` that creates a store in a folder without one."""


def sync_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep sync",
        description="Upload what recorders could not upload because their store was unavailable. Safe to repeat.",
    )
    parsed.add_argument(
        "folder",
        nargs="?",
        help=f"a spill folder, or a folder of them (default: {SPILL}, or the user's cache)",
    )
    parsed.add_argument(
        "--accept-store",
        metavar="ID",
        type=_store_id,
        help="upload to the store with this id, if it is at the path of the store that the data was recorded for: the first line of its "
        f"{MARKER}. '{NEW_STORE}' creates a store in a folder without one",
    )
    return parsed


def _store_id(text: str) -> str:
    if text != NEW_STORE and not known_stores.ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither the id of a store nor '{NEW_STORE}'")
    return text


def sync_main(arguments: Sequence[str]) -> NoReturn:
    """Upload, report the result, and exit with 0 if nothing is left, else 1.

    Raises:
        ConfigError: the folder does not exist, or a new store would replace several.
        StoreError: a new store cannot be created.
    """
    options = sync_parser().parse_args(arguments)
    argument = options.folder
    roots = [absolute_path(argument)] if argument else spill_roots()
    list_folders = named_spill_folders if argument else spill_folders
    folders = [folder for root in roots for folder in list_folders(root)]
    if argument and not folders and not roots[0].is_dir():
        raise ConfigError(
            f"folder {roots[0]} does not exist", f"use a folder from a recorder's log, or {SPILL}"
        )
    accepted = options.accept_store or ""
    if accepted == NEW_STORE:
        accepted = create_accepted(folders)
    results = [sync(folder, accepted) for folder in folders]
    for synced in results:
        sys.stdout.write(f"{printable(_sync_line(synced))}\n")
    if not results:
        sys.stdout.write(f"nothing to upload in {', '.join(map(str, roots))}\n")
    raise SystemExit(1 if any(synced.why for synced in results) else 0)


def _sync_line(synced: Synced) -> str:
    text = f"{synced.run or synced.folder.name}: {synced.objects} objects uploaded, {synced.bytes} bytes"
    return f"{text}; {synced.left} left in {synced.folder}: {synced.why}" if synced.why else text
