"""``watchstep run``: start an unmodified program so that it records itself."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from watchstep import hook_arguments
from watchstep.capture.document.files import CAPTURE, inline, inline_file, inline_from_environment
from watchstep.capture.identity import PROJECT, RUN, new_nonce, new_run_id
from watchstep.capture.mirror.settings import MIRROR, mirror_of
from watchstep.capture.rank_claim import PROGRAM_PROCESS
from watchstep.capture.service.client import ServiceClient, lent, open_recorded, store_in
from watchstep.capture.service.location import FoundService, ServiceLocation, local_folder
from watchstep.capture.service.registration import LaunchState, Registered, control_in, register
from watchstep.capture.service.run_store import require_store
from watchstep.capture.upload.access import earlier_attempts, reuse_warning
from watchstep.errors import (
    ConfigError,
    FormatError,
    NotFoundError,
    ServiceError,
    StoreError,
    WatchstepError,
)
from watchstep.format import documents
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import MAX_BYTES, ControlDocument
from watchstep.format.layout import CONTROL_DOCUMENT, RUN_DOCUMENT, check_name, launch_document, run_prefix
from watchstep.hook import STORE
from watchstep.hook_arguments import ON_STOP, ON_STOP_WORDS
from watchstep.platform.folders import absolute_path
from watchstep.platform.process import ProcessIdentity, pid_namespace, record_process
from watchstep.platform.terminal_text import printable
from watchstep.platform.transport import (
    SERVICE,
    ServiceAddress,
    ServiceRefusedError,
    UnreachableError,
    pause_seconds,
)
from watchstep.stopping import EXIT_TOMBSTONE
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme
from watchstep.wrapper.environment import (
    LAUNCHED,
    AttemptLaunch,
    environment,
    find_program,
    launched_attempt,
)

_DEFAULT_STORE = "watchstep-runs"
_ISOLATING = {"I", "S", "E"}
_STORE_SECONDS = 15.0
"""How long a store may delay the program's start."""
_SERVICE_SECONDS = 15.0
_BUSY_SECONDS = 8.0
"""For how long a launch repeats a registration that the service refuses with 429, as it does if many runs of a project start together."""

_random = random.SystemRandom()  # does not change the state of the program's generator
"""How long a service may delay it: two requests, and finding its address."""

_Result = TypeVar("_Result")


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep run",
        description="Start a program so that it records itself. Its arguments, exit code, signals and output are unchanged.",
    )
    parsed.add_argument(
        "--store",
        help=f"store for runs: a folder or s3://, gs://, az:// (default: {STORE}, or the folder {_DEFAULT_STORE})",
    )
    parsed.add_argument("--project", help=f"the project (default: {PROJECT}, or 'default')")
    parsed.add_argument("--run", dest="run_id", help=f"the run's id (default: {RUN}, or a new one)")
    parsed.add_argument(
        "--resume",
        action="store_true",
        help="the program continues the run that --run names: earlier attempts are expected",
    )
    parsed.add_argument("--rules", help="a rule file to evaluate for this run")
    parsed.add_argument(
        "--capture",
        metavar="FILE",
        help=f"a capture file: what to record, unless the program itself sets it (default: {CAPTURE}, or the project's document)",
    )
    parsed.add_argument(
        "--service",
        help=f"URL of the service (default: {SERVICE}, or the service of the store on this machine)",
    )
    parsed.add_argument(
        "--on-stop",
        choices=ON_STOP_WORDS,
        default=os.environ.get(ON_STOP) or "raise",
        help="effect of a stop by a rule: raise StopTraining at the end of a step (default; 'stop' is the same); 'checkpoint': the same "
        "once the program has saved a new checkpoint, or after 20 s; 'ignore': leave it to the end of the job",
    )
    parsed.add_argument(
        "--on-nonfinite",
        metavar="POLICY",
        help="effect of an update by NaN or infinite gradients: 'record' it (default), 'skip' it, 'skip:N' to stop after N skipped updates "
        "in a row, or 'stop' before the first",
    )
    parsed.add_argument(
        "--explain",
        action="store_true",
        help="before NaN or infinite gradients stop the training, which this option lets them do, compute their step again in the program's own loop "
        "under a trace, to name the operation and the source line that failed",
    )
    parsed.add_argument(
        "--explain-at",
        type=int,
        metavar="STEP",
        help="trace this step and four steps before it, and print which operations have results outside of their usual range, for steps that are finite but wrong",
    )
    parsed.add_argument(
        "--mirror",
        metavar="TOOLS",
        help="mirror alerts and some series into the program's own run: 'wandb', 'mlflow', 'trackio' or 'tensorboard:FOLDER', several separated "
        f"by commas (default: {MIRROR}, or none)",
    )
    parsed.add_argument(
        "--require-service",
        action="store_true",
        help="do not start the program unless a service registers the run; without it, the recorder registers the run once a service answers",
    )
    parsed.add_argument(
        "--require-store",
        action="store_true",
        help="do not start the program unless the store is writable; without it, recorded data waits on this machine",
    )
    parsed.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="the program to start"
    )
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Define the run, register it, and execute the program.

    A service or a store that does not answer does not prevent the program's start, unless an option requires it: the recorder
    catches up later.

    Raises:
        WatchstepError: an option or the request to the service is invalid, or a required service or store fails.
    """
    options = parser().parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ConfigError("watchstep run: no program given", "use watchstep run [options] -- python train.py")
    executable = find_program("watchstep run", program[0])
    hook_arguments.tensorboard_folder(None)  # an invalid variable would keep the program from being recorded
    mirror_of(options.mirror)  # as above
    launch, location = _settle(options)
    rule_file = (
        hook_arguments.load_rule_file(options.rules) if options.rules else hook_arguments.RequestedRules()
    )
    rules, needs = rule_file.configs, rule_file.needs
    capture = inline_file(options.capture) if options.capture else inline_from_environment()
    state = LaunchState(None if location.url else location)
    service = _find(location, required=options.require_service)
    launch = replace(launch, service=service.recorder if service else ServiceAddress.from_environment())
    identity = StoreIdentity.of_launch(launch.store_url)
    work = _StoreWork(launch, identity, rules, required=options.require_store, resumes=options.resume)
    operator = None if service is None or os.environ.get(LAUNCHED) else service.operator
    # The service names the store that belongs in a folder. Before its answer, nothing is created there.
    answers = work.check() if operator is not None and local_folder(launch.store_url) else work.make()
    if not os.environ.get(LAUNCHED):  # otherwise its launcher has registered it and bound its job
        pending, project_capture, stated = _register(
            launch, operator, rules, identity, required=options.require_service
        )
        answers = answers and (work.is_made or work.make())
        capture = capture or _project_capture(project_capture, launch.project)
        needs = (*needs, *(need for need in stated if need not in needs))
        if pending is not None:
            warned = operator is not None
            state = replace(pending, location=location, verified=answers, warned=warned)
        elif not answers:
            state = replace(state, rules=rules)
        if operator is None:
            suffix = "; no service watches the store yet: the run is recorded now, and evaluated once one does (watchstep serve)"
        else:
            suffix = (
                "; the service has not registered it yet"
                if pending
                else "; registered, not yet read by the service"
            )
        sys.stderr.write(f"watchstep: run {launch.project}/{launch.run} in {launch.store_url}{suffix}\n")
    elif not answers:
        state = replace(state, verified=False, rules=rules)
    _warn_if_isolated(program)
    sys.stderr.flush()
    launch = replace(launch, state=_encoded(state), store_id=identity.id, needs=needs, capture=capture)
    variables = environment(launch, os.environ) | {PROGRAM_PROCESS: str(os.getpid())}
    os.execve(executable, program, variables)  # noqa: S606 - this is the command's purpose


def _settle(options: argparse.Namespace) -> tuple[AttemptLaunch, ServiceLocation]:
    """Return the launch, and where to look for its service."""
    url = options.store or os.environ.get(STORE) or _DEFAULT_STORE
    if not checked_scheme(url):
        url = absolute_path(url).as_uri()
    explain = hook_arguments.explains(options.explain or None)
    launch = AttemptLaunch(
        store_url=url,
        project=check_name("project", options.project or os.environ.get(PROJECT) or "default"),
        run=check_name("run", options.run_id or os.environ.get(RUN) or new_run_id()),
        attempt=launched_attempt(os.environ) or new_nonce(),
        on_stop=options.on_stop,
        on_nonfinite=str(hook_arguments.policy_of(options.on_nonfinite, explain=explain)),
        explain=explain,
        mirror=options.mirror or "",
        trace="" if options.explain_at is None else _explained(options.explain_at),
    )
    return launch, ServiceLocation.of(options.service or "", url)


def _explained(step: int) -> str:
    from watchstep.trace.trace_steps import TraceSteps  # loaded for programs that trace only

    TraceSteps.explaining(step)  # an invalid step would keep the program from being recorded
    return f"explain:{step}"


def _find(location: ServiceLocation, *, required: bool) -> FoundService | None:
    try:
        service = (
            location.find()
            if required
            else _within(_STORE_SECONDS, location.find, _silent_store(location.store_url))
        )
    except (ConfigError, StoreError) as error:
        if required:
            raise
        _warn(error, "The program starts without a service")
        return None
    if service is None and required:
        raise ServiceError(
            f"no service watches store {location.store_url}",
            "start 'watchstep serve' on it, name one with --service, or omit --require-service",
        )
    return service


class _StoreWork:
    """Work of a launch on the store: refuse a run that was stopped for good, and create a new one.

    A store that does not answer is reported, and delays the program's start by at most `_STORE_SECONDS`, unless it is required.

    Attributes:
        is_made: whether the run is on the store.
    """

    def __init__(
        self,
        launch: AttemptLaunch,
        identity: StoreIdentity,
        rules: tuple[dict[str, Any], ...],
        *,
        required: bool,
        resumes: bool,
    ) -> None:
        self._launch = launch
        self._identity = identity
        self._rules = rules
        self._required = required
        self._resumes = resumes
        self.is_made = False

    def check(self) -> bool:
        """Refuse a run that was stopped for good, without creating anything. Returns whether the store answered.

        Raises:
            ConfigError: the store's URL is invalid, or the run's folder is a symbolic link.
            StoreError, FormatError: the store is required, and failed.
        """
        return self._answered(self._check_now)

    def make(self) -> bool:
        """Create the run unless it exists; refuse one that was stopped for good. Returns whether the store answered.

        Raises:
            ConfigError: the store's URL is invalid, or the run's folder is a symbolic link.
            StoreError, FormatError: the store is required, and failed.
        """
        self.is_made = self._answered(self._make_now)
        return self.is_made

    def _answered(self, work: Callable[[], None]) -> bool:
        try:
            if self._required:
                work()
            else:
                _within(_STORE_SECONDS, work, _silent_store(self._launch.store_url))
        except (StoreError, FormatError) as error:
            if self._required:
                raise
            _warn(
                error,
                "The program starts. Its recorded data waits on this machine until the store answers; whether the run was stopped for"
                " good is checked then",
            )
            return False
        return True

    def _check_now(self) -> None:
        folder = local_folder(self._launch.store_url)
        assert folder is not None, "only the store of a folder is known to a service by an id"
        self._identity.recall(folder)
        if self._identity.id or folder.is_dir():
            known = self._identity if self._identity.id else None
            self._refuse(Store.open(self._launch.store_url, identity=known))

    def _make_now(self) -> None:
        launch = self._launch
        root = open_recorded(
            launch.store_url,
            (launch.project, launch.run, launch.attempt),
            ServiceClient(launch.service, launch.project) if launch.service else None,
            lambda where, error: print(f"watchstep: {where}: {printable(error)}", file=sys.stderr),  # noqa: T201 - to the user
            identity=self._identity,
        )
        store = self._refuse(root)
        if not lent():  # lent credentials may only write the attempt
            root.check_writable()
        document = documents.RunDocument(launch.project, launch.run, time.time_ns(), self._rules)
        is_new = store.create(RUN_DOCUMENT, documents.encode(document))
        if lent() or os.environ.get(LAUNCHED):
            return
        _note_launch(store, launch.attempt)
        earlier = 0 if is_new else len(earlier_attempts(store, launch.attempt))
        if earlier and not self._resumes:
            sys.stderr.write(
                f"watchstep: {reuse_warning(launch.project, launch.run, earlier)}\n"
                "  hint: add --resume if the program continues this run, or name another with --run\n"
            )

    def _refuse(self, root: Store) -> Store:
        """Return the run's store, unless the run was stopped for good or its folder is a symbolic link."""
        launch = self._launch
        if root.is_local:
            _refuse_linked(launch, Path(root.location))
        store = root.child(run_prefix(launch.project, launch.run))
        try:
            control = ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES))
        except NotFoundError:
            return store
        _refuse_stopped(launch, control)
        return store


def _refuse_linked(launch: AttemptLaunch, root: Path) -> None:
    """Refuse a run whose folder is a symbolic link: whoever may write to the store would choose where this user's program writes.

    Raises:
        ConfigError: the folder is a link.
    """
    folder = root / launch.project / launch.run
    if folder.is_symlink():
        raise ConfigError(
            f"run {launch.project}/{launch.run}: its folder {folder} is a symbolic link",
            "replace the link by the folder, or name another run with --run",
        )


def _note_launch(store: Store, attempt: str) -> None:
    """Save this process's identity, which `exec` preserves. The end of a program that records nothing can then be detected."""
    try:
        process = ProcessIdentity.of(os.getpid())
    except ConfigError:
        return  # not on Linux
    document = documents.LaunchDocument(
        attempt, time.time_ns(), process.pid, process.start_ticks, process.boot, process.host, pid_namespace()
    )
    store.create(launch_document(attempt), documents.encode(document))


def _refuse_stopped(launch: AttemptLaunch, control: ControlDocument) -> None:
    if control.admits(launch.attempt):
        return
    sys.stderr.write(
        f"watchstep: run {launch.run} was stopped ({printable(control.tombstone)}) and does not start again.\n"
        "  hint: start it under a new run id, or allow it with 'watchstep runs allow-restart "
        f"{launch.project}/{launch.run}'\n"
    )
    raise SystemExit(EXIT_TOMBSTONE)


def _silent_store(url: str) -> StoreError:
    return StoreError(
        f"store {url}: no answer within {_STORE_SECONDS:.0f} s",
        "check that it answers, or use --require-store",
    )


def _within(seconds: float, work: Callable[[], _Result], late: WatchstepError) -> _Result:
    """Run something that may hang on a thread; a hanging thread ends when this process executes the program.

    Raises:
        WatchstepError: ``late``, if it takes too long.
        BaseException: the function's own exception.
    """
    results: list[_Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run, name="watchstep-launch", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not results:
        raise late
    return results[0]


def _register(
    launch: AttemptLaunch,
    operator: ServiceAddress | None,
    rules: tuple[dict[str, Any], ...],
    identity: StoreIdentity,
    *,
    required: bool,
) -> tuple[LaunchState | None, Any, tuple[CaptureNeed, ...]]:
    """Register the run. The identity of a folder becomes that of the store that the service reads.

    Returns:
        What is left for the recorder to register, None for nothing; the project's capture document; and what the rules of the run need,
        those of the service's owner and of the project included.

    Raises:
        ServiceRefusedError: the request is invalid, or the service is required and refuses.
        ServiceError: the service is required, and does not answer, or its answer is invalid.
    """
    job = _own_job()
    pending = LaunchState(run=launch.run, attempt=launch.attempt, job=job, rules=rules)
    if operator is None:
        if rules:
            sys.stderr.write(
                "watchstep: no service: the rules are saved with the run, and evaluated when one watches this store"
                f" (watchstep serve --store {launch.store_url})\n"
            )
        return pending, None, ()

    def registered() -> tuple[Registered, ControlDocument]:
        until, tries = time.monotonic() + _BUSY_SECONDS, 0
        while True:
            try:
                answer = register(
                    operator, (launch.project, launch.run, launch.attempt), launch.store_url, rules, job
                )
                break
            except ServiceRefusedError as error:
                tries += 1
                pause = pause_seconds(tries, error.after_seconds) * _random.uniform(0.5, 1.5)
                if error.status != HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
        if (store := store_in(answer.data)) is not None:
            require_store(identity, launch.store_url, *store)
        return answer, control_in(answer.data)

    late = UnreachableError(
        f"service {operator.url}: no answer within {_SERVICE_SECONDS:.0f} s",
        "check the URL, and that 'watchstep serve' runs there",
    )
    try:
        answer, control = _within(_SERVICE_SECONDS, registered, late)
    except ServiceError as error:
        if required or (isinstance(error, ServiceRefusedError) and error.is_final):
            raise
        denied = isinstance(error, ServiceRefusedError) and error.is_denial
        _warn(
            error,
            "The program starts and records. Its rules are not evaluated and nothing stops it until the service accepts it"
            if denied
            else "The program starts. The recorder registers the run when the service answers",
        )
        return pending, None, ()
    _refuse_stopped(launch, control)
    if answer.job_refusal is not None:
        refusal = answer.job_refusal
        sys.stderr.write(
            f"watchstep: {printable(refusal.what)}: the run is evaluated, but a stop only requests the program's end, and cannot end its job\n"
            f"  hint: {printable(refusal.hint)}; 'watchstep attach --job local:{os.getpid()}' binds the job now\n"
        )
    return None, answer.data.get("capture"), control.needs


def _project_capture(document: Any, project: str) -> str:
    """Return the capture document of a project for the program; empty if there is none, or if this version cannot read it."""
    if document is None:
        return ""
    try:
        text = inline(document, f"capture document of project {project}")
    except ConfigError as error:
        _warn(error, "The program starts, and records with the built-in configuration")
        return ""
    sys.stderr.write(f"watchstep: recording what the capture document of project {project} names\n")
    return text


def _own_job() -> dict[str, Any] | None:
    """Return this process as a job; exec preserves its id and start time. None on systems without process identities."""
    try:
        process = record_process(os.getpid()).identity
    except (ConfigError, OSError) as error:
        _warn(error, "The program starts. A stop can only request its end")
        return None
    return {"backend": "local", "id": str(process.pid), "identity": asdict(process)}


def _encoded(state: LaunchState) -> str:
    if state == LaunchState():
        return ""
    try:
        return state.encode()
    except FormatError as error:
        _warn(error, "The program starts, and these rules are not evaluated")
        return replace(state, rules=()).encode()


def _warn(error: Exception, consequence: str) -> None:
    what, hint = (error.what, error.hint) if isinstance(error, WatchstepError) else (str(error), "")
    hint = f"\n  hint: {printable(hint)}" if hint else ""
    sys.stderr.write(f"watchstep: {printable(what)}\n  {consequence}.{hint}\n")


def _warn_if_isolated(program: Sequence[str]) -> None:
    """Warn about Python's -I, -S and -E, which disable the injected code, instead of silently recording nothing."""
    if not Path(program[0]).name.startswith("python"):
        return
    for argument in program[1:]:
        if not argument.startswith("-") or argument.startswith("--") or argument[1:2] in {"c", "m"}:
            return
        if flags := _ISOLATING & set(argument[1:]):
            sys.stderr.write(
                f"watchstep: not attached: python -{flags.pop()} disables the start-up code of watchstep run."
                " Remove the flag, or use watchstep.Hook in the program.\n"
            )
            return
