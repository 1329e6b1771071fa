"""``watchstep sync``: upload what recorders left on this machine when their store could not be reached."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from watchstep.capture.upload.spill import SPILL, spill_roots
from watchstep.capture.upload.sync import Synced, named_spill_folders, spill_folders, sync
from watchstep.errors import ConfigError
from watchstep.platform.folders import absolute_path
from watchstep.platform.terminal_text import printable


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep sync",
        description="Upload what recorders left on this machine when their store could not be reached. Safe to repeat.",
    )
    parsed.add_argument(
        "folder", nargs="?", help=f"one folder, or a folder of them (else {SPILL}, or the user's cache)"
    )
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Upload, say what was done, and exit: 0 where nothing is left, else 1.

    Raises:
        ConfigError: the folder is none of a recorder's.
    """
    named = parser().parse_args(arguments).folder
    roots = [absolute_path(named)] if named else spill_roots()
    listed = named_spill_folders if named else spill_folders
    folders = [folder for root in roots for folder in listed(root)]
    if named and not folders and not roots[0].is_dir():
        raise ConfigError(
            f"folder {roots[0]}: not found", f"name a folder that a recorder's log named, or {SPILL}"
        )
    done = [sync(folder) for folder in folders]
    for one in done:
        sys.stdout.write(f"{printable(_line(one))}\n")
    if not done:
        sys.stdout.write(f"nothing to upload in {', '.join(map(str, roots))}\n")
    raise SystemExit(1 if any(one.why for one in done) else 0)


def _line(one: Synced) -> str:
    what = f"{one.run or one.folder.name}: {one.objects} objects uploaded, {one.bytes} bytes"
    return f"{what}; {one.left} left in {one.folder}: {one.why}" if one.why else what
