"""``watchstep run``: start a program so that it records itself, with no change to it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from watchstep import documents, rule_files
from watchstep.capture.identity import PROJECT, RUN, new_nonce, new_run_id
from watchstep.capture.lent_credentials import lent, open_recorded
from watchstep.capture.service_client import SERVICE, TOKEN, RefusalError, ServiceAddress, ServiceClient
from watchstep.control import MAX_BYTES, ControlDocument
from watchstep.errors import ConfigError, NotFoundError
from watchstep.hook import STORE
from watchstep.hook_arguments import ON_STOP, ON_STOP_WORDS
from watchstep.launch.environment import LAUNCHED, Launch, environment, launched_attempt
from watchstep.layout import CONTROL_DOCUMENT, RUN_DOCUMENT, check_name, run_prefix
from watchstep.process_identity import ProcessIdentity
from watchstep.stopping import EXIT_TOMBSTONE
from watchstep.store import Store, checked_scheme

HOME = "WATCHSTEP_HOME"
_ISOLATING = {"I", "S", "E"}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep run",
        description="Start a program so that it records itself. Its arguments, exit code, signals and output are its own.",
    )
    parsed.add_argument("--store", help=f"where runs lie: a folder or s3://, gs://, az:// (or {STORE})")
    parsed.add_argument("--project", help=f"the project (or {PROJECT}; else 'default')")
    parsed.add_argument("--run", dest="run_id", help=f"the run's id (or {RUN}; else a new one)")
    parsed.add_argument("--rules", help="a rule file to judge this run by")
    parsed.add_argument(
        "--service", help=f"URL of the service (or {SERVICE}; else the one that serves the store here)"
    )
    parsed.add_argument(
        "--on-stop",
        choices=ON_STOP_WORDS,
        default=os.environ.get(ON_STOP) or "raise",
        help="when a rule stops the run: raise StopTraining at the end of a step (default, or 'stop'); the same once the "
        "program has saved a checkpoint; or leave it to the job's end (ignore)",
    )
    parsed.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="what to start")
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Settle the run, make it known, and become the program.

    Raises:
        WatchstepError: an option is wrong, the store cannot be written, or the service refuses.
    """
    options = parser().parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ConfigError("watchstep run: no program", "watchstep run [options] -- python train.py")
    executable = shutil.which(program[0])
    if executable is None:
        raise ConfigError(f"watchstep run: program {program[0]!r} not found", "check its name and PATH")
    launch, operator = _settle(options)
    rules = rule_files.load(options.rules) if options.rules else []
    _make_run(launch, rules)
    if not os.environ.get(LAUNCHED):  # else its launcher has registered it, bound its job and told who asked
        _register(launch, operator, rules)
        judged = "" if operator else "; no service watches it: recorded, not judged"
        sys.stderr.write(f"watchstep: run {launch.project}/{launch.run} in {launch.store_url}{judged}\n")
    _warn_if_isolated(program)
    sys.stderr.flush()
    os.execve(executable, program, environment(launch, os.environ))  # noqa: S606 - it is what the user asked for


def _settle(options: argparse.Namespace) -> tuple[Launch, ServiceAddress | None]:
    """The launch, and with whose rights it is registered."""
    url = options.store or os.environ.get(STORE) or "watchstep-runs"
    if not checked_scheme(url):
        url = Path(url).expanduser().absolute().as_uri()
    service = find_service(options.service, url)
    launch = Launch(
        store_url=url,
        project=check_name("project", options.project or os.environ.get(PROJECT) or "default"),
        run=check_name("run", options.run_id or os.environ.get(RUN) or new_run_id()),
        attempt=launched_attempt(os.environ) or new_nonce(),
        service=service.recorder if service else None,
        on_stop=options.on_stop,
    )
    return launch, service.operator if service else None


@dataclass(frozen=True)
class FoundService:
    """A service to register with, and what the program may use of it.

    Attributes:
        operator: registers the run and binds its job.
        recorder: for the program itself, which may announce and no more.
    """

    operator: ServiceAddress
    recorder: ServiceAddress


def find_service(url: str | None, store_url: str) -> FoundService | None:
    """The service named, or the one on this machine that watches the store; None where there is none.

    Raises:
        ConfigError: the URL is none, or the service's own note cannot be used.
    """
    if url:
        named = ServiceAddress.checked(url, os.environ.get(TOKEN, ""))
        return FoundService(named, named)
    if (known := ServiceAddress.from_environment()) is not None:
        return FoundService(known, known)
    homes = [Path(os.environ.get(HOME, "~/.watchstep")).expanduser()]
    if store_url.startswith("file:"):
        homes.insert(0, Path(store_url.removeprefix("file://")) / ".watchstep")
    return next((found for home in homes if (found := service_at(home, store_url)) is not None), None)


def service_at(home: Path, store_url: str) -> FoundService | None:
    """The service of a home, where one runs and watches the store.

    Raises:
        ConfigError: its note cannot be used.
    """
    note = home / "service.json"
    try:
        held = json.loads(note.read_text(encoding="utf-8"))
        url, pid = str(held["url"]), int(held["pid"])
        tokens = str(held["operator_token"]), str(held["recorder_token"])
        watched = Store.open(str(held["store"])).url
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{note}: cannot be used ({error})", "remove it, or name the service by --service"
        ) from error
    if watched != store_url.rstrip("/") or not Path(f"/proc/{pid}").exists():
        return None
    return FoundService(ServiceAddress.checked(url, tokens[0]), ServiceAddress.checked(url, tokens[1]))


def _make_run(launch: Launch, rules: list[dict[str, Any]]) -> None:
    """Make the run, unless it is there; refuse one that was stopped for good."""
    root = open_recorded(
        launch.store_url,
        (launch.project, launch.run, launch.attempt),
        ServiceClient(launch.service, launch.project) if launch.service else None,
        lambda where, error: print(f"watchstep: {where}: {error}", file=sys.stderr),  # noqa: T201 - to the user
    )
    if not lent():  # lent credentials write the attempt only, as the run's document shows
        root.check_writable()
    store = root.child(run_prefix(launch.project, launch.run))
    try:
        control = ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES))
    except NotFoundError:
        control = ControlDocument()
    if not control.admits(launch.attempt):
        sys.stderr.write(
            f"watchstep: run {launch.run} was stopped ({control.tombstone}) and does not start again.\n"
            "  mend: start it under a new run id, or let it by 'watchstep runs allow-restart "
            f"{launch.project}/{launch.run}'\n"
        )
        raise SystemExit(EXIT_TOMBSTONE)
    document = documents.RunDocument(launch.project, launch.run, time.time_ns(), tuple(rules))
    store.create(RUN_DOCUMENT, documents.encode(document))


def _register(launch: Launch, operator: ServiceAddress | None, rules: list[dict[str, Any]]) -> None:
    if operator is None:
        if rules:
            sys.stderr.write(
                "watchstep: no service: the rules are kept with the run, and judged when one watches this store"
                f" (watchstep serve --store {launch.store_url})\n"
            )
        return
    me = ProcessIdentity.of(os.getpid())  # exec keeps both the id and the start time
    job = {"backend": "local", "id": str(me.pid), "identity": asdict(me)}
    client = ServiceClient(operator, launch.project)
    asked = {"run": launch.run, "attempt": launch.attempt, "rules": rules}
    try:
        client.register({**asked, "job": job})
    except RefusalError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        client.register(asked)  # raises for a token that may not even record
        sys.stderr.write(
            f"watchstep: {error.what}: the run is judged, and a stop asks the program alone, which no job's end follows\n"
            f"  mend: {error.mend}; 'watchstep attach --job local:{me.pid}' does it now\n"
        )


def _warn_if_isolated(program: Sequence[str]) -> None:
    """Python's -I, -S and -E keep the injected code from running: say so, rather than record nothing in silence."""
    if not Path(program[0]).name.startswith("python"):
        return
    for argument in program[1:]:
        if not argument.startswith("-") or argument.startswith("--") or argument[1:2] in {"c", "m"}:
            return
        if found := _ISOLATING & set(argument[1:]):
            sys.stderr.write(
                f"watchstep: not attached: python -{found.pop()} ignores what watchstep run adds."
                " Leave the flag out, or use watchstep.Hook in the program.\n"
            )
            return
