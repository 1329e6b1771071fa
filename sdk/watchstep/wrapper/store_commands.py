"""Commands for stores: ``watchstep sync`` uploads recorders' remaining data on this machine; ``watchstep migrate-store`` rewrites earlier runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from watchstep.capture.upload.spill import SPILL, spill_roots
from watchstep.capture.upload.uploader import NEW_STORE, Synced, named_spill_folders, spill_folders, sync
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import run_prefix
from watchstep.platform.folders import absolute_path
from watchstep.platform.terminal_text import printable
from watchstep.reading.migration import SILENT_SECONDS, MigratedRun, RunInUseError, migrate_run
from watchstep.store import known_stores
from watchstep.store.local import MARKER
from watchstep.store.store import Store


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
        ConfigError: the folder does not exist.
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
    results = [sync(folder, options.accept_store or "") for folder in folders]
    for synced in results:
        sys.stdout.write(f"{printable(_sync_line(synced))}\n")
    if not results:
        sys.stdout.write(f"nothing to upload in {', '.join(map(str, roots))}\n")
    raise SystemExit(1 if any(synced.why for synced in results) else 0)


def _sync_line(synced: Synced) -> str:
    text = f"{synced.run or synced.folder.name}: {synced.objects} objects uploaded, {synced.bytes} bytes"
    return f"{text}; {synced.left} left in {synced.folder}: {synced.why}" if synced.why else text


def migrate_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep migrate-store",
        description="Rewrite runs that an earlier version recorded in the current format. Safe to repeat and to "
        "interrupt. Stop the services that read the store first. Exits with 1 if a run was left unchanged.",
    )
    parsed.add_argument("store", help="the store: a folder or s3://, gs://, az://")
    parsed.add_argument("--project", help="only the runs of one project")
    parsed.add_argument(
        "--dry-run", action="store_true", help="count what would be rewritten, and write nothing"
    )
    parsed.add_argument(
        "--silent-seconds",
        type=float,
        default=SILENT_SECONDS,
        help="migrate a run that has not ended once nothing in it has changed for this long (default %(default)s)",
    )
    return parsed


def migrate_main(arguments: Sequence[str]) -> NoReturn:
    """Migrate, report each run, and exit with 0, or with 1 if a run or an object was left unchanged.

    Raises:
        StoreError: the store cannot be read or written.
    """
    options = migrate_parser().parse_args(arguments)
    store = Store.open(options.store)
    complete, runs, rewritten = True, 0, 0
    for project, run in _runs(store, options.project):
        name = f"{project}/{run}"
        try:
            done = migrate_run(
                store.child(run_prefix(project, run)),
                name,
                dry_run=options.dry_run,
                silent_seconds=options.silent_seconds,
            )
        except RunInUseError as error:
            complete = False
            _print(f"{error.what}: left unchanged; {error.hint}")
            continue
        except NotFoundError:
            continue  # a folder without a run
        complete = complete and not done.damaged
        runs += 1
        rewritten += not done.is_current
        _print(_migration_line(done, dry_run=options.dry_run))
    _print(f"{rewritten} of {runs} runs {'to rewrite' if options.dry_run else 'rewritten'}")
    raise SystemExit(0 if complete else 1)


def _runs(store: Store, project: str | None) -> Iterator[tuple[str, str]]:
    for name in store.folders() if project is None else [project]:
        for run in store.folders(f"{name}/"):
            yield name, run


def _migration_line(done: MigratedRun, *, dry_run: bool) -> str:
    if done.is_current and not done.damaged:
        return f"{done.name}: current"
    counts = (
        f"{done.segments} segments, {done.compacted} compacted segments, {done.snapshots} snapshots, "
        f"{done.documents} documents"
    )
    line = f"{done.name}: {counts} {'to rewrite' if dry_run else 'rewritten'}"
    for key, reason in done.damaged.items():
        line += f"\n  {key} left unchanged: {reason}"
    return line


def _print(text: str) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in text.split("\n")))
