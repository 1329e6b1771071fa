"""Commands over stores: ``watchstep sync`` uploads what recorders left on this machine; ``watchstep migrate-store`` rewrites earlier runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from watchstep.capture.upload.spill import SPILL, spill_roots
from watchstep.capture.upload.uploader import Synced, named_spill_folders, spill_folders, sync
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import run_prefix
from watchstep.platform.folders import absolute_path
from watchstep.platform.terminal_text import printable
from watchstep.reading.migration import SILENT_SECONDS, MigratedRun, RunInUseError, migrate_run
from watchstep.store.store import Store


def sync_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep sync",
        description="Upload what recorders left on this machine when their store could not be reached. Safe to repeat.",
    )
    parsed.add_argument(
        "folder", nargs="?", help=f"one folder, or a folder of them (else {SPILL}, or the user's cache)"
    )
    return parsed


def sync_main(arguments: Sequence[str]) -> NoReturn:
    """Upload, say what was done, and exit: 0 where nothing is left, else 1.

    Raises:
        ConfigError: the folder is none of a recorder's.
    """
    named = sync_parser().parse_args(arguments).folder
    roots = [absolute_path(named)] if named else spill_roots()
    listed = named_spill_folders if named else spill_folders
    folders = [folder for root in roots for folder in listed(root)]
    if named and not folders and not roots[0].is_dir():
        raise ConfigError(
            f"folder {roots[0]}: not found", f"name a folder that a recorder's log named, or {SPILL}"
        )
    done = [sync(folder) for folder in folders]
    for synced in done:
        sys.stdout.write(f"{printable(_sync_line(synced))}\n")
    if not done:
        sys.stdout.write(f"nothing to upload in {', '.join(map(str, roots))}\n")
    raise SystemExit(1 if any(synced.why for synced in done) else 0)


def _sync_line(synced: Synced) -> str:
    what = f"{synced.run or synced.folder.name}: {synced.objects} objects uploaded, {synced.bytes} bytes"
    return f"{what}; {synced.left} left in {synced.folder}: {synced.why}" if synced.why else what


def migrate_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep migrate-store",
        description="Rewrite runs that an earlier version recorded with the names that this version reads. Safe to repeat and to "
        "interrupt. Stop the services that read the store first. Exit code 1 where a run was left as it is.",
    )
    parsed.add_argument("store", help="where runs lie: a folder or s3://, gs://, az://")
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
    """Migrate, report each run, and exit: 0, or 1 where a run or an object was left as it is.

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
            _print(f"{error.what}: left as it is; {error.hint}")
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
        line += f"\n  {key} left as it is: {reason}"
    return line


def _print(text: str) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in text.split("\n")))
