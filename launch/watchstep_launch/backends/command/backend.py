"""Jobs by the user's own commands: whatever has a command to submit, ask and stop has a backend.

Running a command of the user's own, within a time, and leaving nothing of it behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    BackendModel,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobState,
    JobStatus,
    Launch,
    LogPart,
    SubmissionRejectedError,
)

NAME = "command"
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@/\[\]-]{0,199}")


class Command(BackendModel):
    """Submits, asks and stops by commands. No shell sees them: write ``sh -c '…'`` where you want one.

    Patterns are regular expressions that are searched for in what a command prints.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 2.0
    submission_seconds: ClassVar[float] = 60.0  # the submit command outlives its launcher
    shares_files: ClassVar[bool] = True

    submit_command: str = Field(
        description="Starts a job: {command} becomes the program's words, {command_line} the same for a shell; {name}, {folder} and {log}."
        " The variables that the job needs are in its environment."
    )
    status_command: str = Field(description="Tells how job {id} is.")
    stop_command: str = Field(description="Asks job {id} to end.")
    kill_command: str = Field("", description="Ends job {id}; the stop command again where it is left out.")
    logs_command: str = Field(
        "", description="Prints all that job {id} has written so far; none where it is left out."
    )
    jobs_command: str = Field(
        "", description="Prints the ids of Watchstep's jobs that are not over, a line each."
    )
    find_command: str = Field("", description="Prints the id of the job called {name}, if there is one.")
    id_pattern: str = Field(
        r"(\S+)\s*$", description="Finds the id in what the submit command prints: its first group."
    )
    started_pattern: str = Field(
        "",
        description="Finds in the status what no later job with the same id has: its first group, a start time, say.",
    )
    exit_code_pattern: str = Field("", description="Finds the exit code in the status: its first group.")
    states: dict[str, JobState] = Field(
        default_factory=dict, description="Pattern: state, the first that is found in the status."
    )
    state_codes: dict[int, JobState] = Field(
        default_factory=dict, description="Exit code of the status command: state, where no pattern is found."
    )
    down_pattern: str = Field(
        "", description="Found in what a command says where the cluster does not answer."
    )
    expired_pattern: str = Field(
        "", description="Found in what a command says where credentials have expired."
    )
    timeout_seconds: float = Field(20.0, gt=0, le=30, description="How long a command may take.")

    @field_validator("id_pattern", "started_pattern", "exit_code_pattern", "down_pattern", "expired_pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression ({error})") from error
        return value

    @field_validator("id_pattern", "started_pattern", "exit_code_pattern")
    @classmethod
    def _has_group(cls, value: str) -> str:
        if value and not re.compile(value).groups:
            raise ValueError(f"{value!r} has no group")
        return value

    @field_validator("states")
    @classmethod
    def _all_compile(cls, value: dict[str, JobState]) -> dict[str, JobState]:
        for pattern in value:
            cls._compiles(pattern)
        return value

    def submit(self, launch: Launch) -> JobHandle:
        """Run the submit command, in the launch's folder and with its variables.

        Raises:
            SubmissionRejectedError: it fails, or prints no id.
        """
        values = {"name": launch.name, "folder": str(launch.folder), "log": str(launch.log or "")}
        command = words(self.submit_command, values, launch.command)
        try:
            answer = run(
                command, self.timeout_seconds, launch.folder, {**launch.environment, **launch.secrets}
            )
        except TimedOutError as error:
            return self._found_again(launch.name, error)
        except ConfigError as error:
            raise SubmissionRejectedError(error.what, error.hint) from error
        if answer.code:
            self._refuse_if_away(answer)
            raise SubmissionRejectedError(
                f"{command[0]} refused {launch.name or launch.command[0]!r}: {answer.said}",
                "correct what it names",
            )
        found = re.search(self.id_pattern, answer.text)
        if found is None or not _ID.fullmatch(found[1]):
            raise SubmissionRejectedError(
                f"{command[0]} printed no id ({answer.said!r}): what it may have started cannot be asked for",
                f"set id_pattern, which is {self.id_pattern!r}; look for the job by its name {launch.name!r}",
            )
        return self._handle(found[1], "" if launch.log is None else str(launch.log))

    def status(self, job: JobHandle) -> JobStatus:
        """What the status command tells; "vanished" where its start is another's."""
        answer = self._ask(self.status_command, job.id)
        state = self._state(answer)
        if state is None:
            self._refuse_if_away(answer)
            if answer.code:
                raise BackendDownError(
                    f"job {job.id}: {answer.said}", "see to the status command, or add to state_codes"
                )
            return JobStatus("unknown", detail=answer.said)
        started = job.identity.get("started", "")
        if self.started_pattern and started and state != "vanished" and self._started(answer) != started:
            return JobStatus("vanished", detail=f"{job.id} is another job now")
        code = re.search(self.exit_code_pattern, answer.text) if self.exit_code_pattern else None
        over = JobStatus(state).is_over
        return JobStatus(state, int(code[1]) if code and over and _is_number(code[1]) else None)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the logs command prints beyond the place."""
        if not self.logs_command:
            return LogPart(b"", cursor)
        answer = self._ask(self.logs_command, job.id)
        self._refuse_if_away(answer)
        start = int(cursor) if cursor.isdecimal() else 0
        return LogPart(answer.output[start:], str(max(start, len(answer.output))))

    def stop(self, job: JobHandle) -> JobStatus:
        """Run the stop command, if it is this very job."""
        return self._end(job, self.stop_command)

    def kill(self, job: JobHandle) -> JobStatus:
        """Run the kill command, if it is this very job."""
        return self._end(job, self.kill_command or self.stop_command)

    def jobs(self) -> list[JobHandle]:
        """Those that the jobs command names; none without one."""
        if not self.jobs_command:
            return []
        answer = self._run(self.jobs_command, {})
        self._refuse_if_away(answer)
        found = [self._handle(name) for name in answer.text.split() if _ID.fullmatch(name)]
        return [job for job in found if not self.status(job).is_over]

    def find(self, name: str) -> JobHandle | None:
        """The job that the find command prints; None where it prints nothing.

        Raises:
            BackendDownError: there is no such command, or it fails.
        """
        if not self.find_command:
            raise BackendDownError(
                f"a job {name!r} may have begun, and no find_command tells",
                "set find_command, or look for the job by its name",
            )
        answer = self._run(self.find_command, {"name": name})
        self._refuse_if_away(answer)
        found = answer.text.strip()
        if answer.code or (found and not _ID.fullmatch(found)):
            raise BackendDownError(
                f"job {name!r}: {self.find_command!r} said {answer.said!r}",
                "see to the find command: it prints one id, or nothing where there is none",
            )
        return self._handle(found) if found else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The job that the status command knows by this id.

        Raises:
            JobNotFoundError: it knows none.
        """
        missing = JobNotFoundError(
            f"job {id!r}: not known to {self.status_command!r}", "give an id that it knows"
        )
        if not _ID.fullmatch(id):
            raise missing
        job = self._handle(id)
        if self.status(job).state in ("vanished", "unknown"):
            raise missing
        return job

    def settled(self, job: JobHandle) -> JobHandle:
        """The same job.

        Raises:
            ConfigError: the identity holds something else than what ``started_pattern`` finds.
        """
        expected = {"started"} if self.started_pattern else set()
        if set(job.identity) != expected or not all(
            isinstance(value, str) for value in job.identity.values()
        ):
            raise ConfigError(
                f"job {job.id!r}: its identity has {sorted(job.identity)}", f"give exactly {sorted(expected)}"
            )
        return JobHandle(job.backend, job.id, dict(job.identity), job.details)

    def _end(self, job: JobHandle, command: str) -> JobStatus:
        before = self.status(job)
        if before.is_over or not before.in_sight:
            return before
        answer = self._ask(command, job.id)
        after = self.status(job)
        if answer.code and not after.is_over:
            self._refuse_if_away(answer)
            raise BackendError(f"job {job.id} could not be stopped: {answer.said}", f"see to {command!r}")
        return after

    def _handle(self, id: str, log: str = "") -> JobHandle:  # noqa: A002 - as people call it
        identity: dict[str, Any] = {}
        if self.started_pattern:
            identity["started"] = self._started(self._ask(self.status_command, id))
        return JobHandle(NAME, id, identity, {"log": log} if log else {})

    def _found_again(self, name: str, error: TimedOutError) -> JobHandle:
        if self.find_command and name:
            found = self._run(self.find_command, {"name": name})
            if not found.code and _ID.fullmatch(found.text.strip()):
                return self._handle(found.text.strip())
            if not found.code and not found.text.strip():
                raise BackendDownError(f"{error.what}; no job {name!r} was begun", error.hint) from error
        raise BackendDownError(
            f"{error.what}; a job {name!r} may have begun", f"look for it, and {error.hint}"
        ) from error

    def _started(self, answer: CommandResult) -> str:
        found = re.search(self.started_pattern, answer.text)
        return found[1] if found else ""

    def _state(self, answer: CommandResult) -> JobState | None:
        for pattern, state in self.states.items():
            if re.search(pattern, answer.text):
                return state
        return self.state_codes.get(answer.code)

    def _refuse_if_away(self, answer: CommandResult) -> None:
        said = answer.text + answer.errors
        if self.expired_pattern and re.search(self.expired_pattern, said):
            raise CredentialsExpiredError(answer.said, "renew the credentials, and ask again")
        if self.down_pattern and re.search(self.down_pattern, said):
            raise BackendDownError(answer.said, "try again later")

    def _ask(self, template: str, id: str) -> CommandResult:  # noqa: A002 - as people call it
        if not _ID.fullmatch(id):
            raise ConfigError(f"job {id!r}: no id that a command may be given", "bind the job by its id")
        return self._run(template, {"id": id})

    def _run(self, template: str, values: dict[str, str]) -> CommandResult:
        return run(words(template, values), self.timeout_seconds, Path("/"), {})


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,9}", text) is not None


_MOST = 16 * 1024 * 1024
_CHUNK = 64 * 1024
_LOOK_SECONDS = 0.05
"""How often it is looked whether a command has ended while its outputs are open."""
_END_SECONDS = 5.0
"""How long a killed process is waited for."""


@dataclass(frozen=True)
class CommandResult:
    """What a command came to."""

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        """Its output as text."""
        return self.output.decode("utf-8", "replace")

    @property
    def said(self) -> str:
        """What it gave for a reason, in one line."""
        return " ".join((self.errors or self.text).split())[:500] or f"exit code {self.code}"


class TimedOutError(BackendDownError):
    """A command did not end in time. It was killed; what it had done by then is not known."""


def words(template: str, values: Mapping[str, str], command: Sequence[str] = ()) -> list[str]:
    """A template as words. No shell sees it: a value is one word, or a part of one, whatever it holds.

    Args:
        template: its ``{names}`` are replaced; a word ``{command}`` becomes all words of the program, and
            ``{command_line}`` stands for them quoted for a shell.
        values: name → text.
        command: the program and its arguments.

    Raises:
        ConfigError: it cannot be taken apart, or names something else.
    """
    held = {**values, "command_line": shlex.join(command)} if command else dict(values)
    made: list[str] = []
    try:
        for word in shlex.split(template):
            made += command if word == "{command}" and command else [word.format_map(held)]
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        known = ", ".join(f"{{{name}}}" for name in [*held, *(["command"] if command else [])])
        raise ConfigError(
            f"command {template!r}: cannot be read ({error!r})", f"it may hold {known}"
        ) from error
    if not made:
        raise ConfigError(f"command {template!r}: names no program", "name one")
    return made


def run(
    command: Sequence[str], seconds: float, folder: Path, environment: Mapping[str, str]
) -> CommandResult:
    """Run a command to its end.

    A command has ended once its own process has, also where a process that it left in the background holds its
    outputs: what is in them by then is the answer, and they are closed. 16 MiB of each output are kept, and what comes
    after is read and dropped.

    Raises:
        ConfigError: there is no such program.
        TimedOutError: it takes longer than so many seconds. It was killed, with its process group and with all processes that
            descend from it then, whatever their session. A process whose parent had ended before, as a daemon makes sure of,
            is not known to be the command's, and goes on.
    """
    try:
        child = subprocess.Popen(  # noqa: S603 - running the user's command is what this is for
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
            env={**os.environ, **environment}, start_new_session=True, bufsize=0,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"command {command[0]!r}: cannot be started ({error.strerror})", "check its name, and PATH"
        ) from error
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout as output, child.stderr as errors:
        try:
            code, (written, complained) = _follow(child, (output.fileno(), errors.fileno()), seconds)
        except subprocess.TimeoutExpired:
            still = "" if _kill(child) else f"; process {child.pid} could not be ended"
            raise TimedOutError(
                f"command {command[0]!r}: no answer in {seconds:g} s{still}",
                "try again, or give it more timeout_seconds",
            ) from None
    return CommandResult(code, written, complained.decode("utf-8", "replace"))


def _follow(child: subprocess.Popen[bytes], pipes: Sequence[int], seconds: float) -> tuple[int, list[bytes]]:
    """The exit code of a command, and the beginning of what it wrote to each pipe.

    Raises:
        subprocess.TimeoutExpired: it is still running.
    """
    deadline = time.monotonic() + seconds
    contents = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        # Others may hold the pipes: their end is not waited for once the command itself has ended.
        while selector.get_map() and child.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(child.args, seconds)
            for key, _ in selector.select(min(left, _LOOK_SECONDS)):
                if not _read(key.fd, contents[key.fd], _CHUNK):
                    selector.unregister(key.fd)
        code = child.wait(max(0.0, deadline - time.monotonic()))
        for pipe in [key.fd for key in selector.get_map().values()]:
            waiting = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(struct.calcsize("i"))))[0]
            while waiting > 0 and (size := _read(pipe, contents[pipe], min(waiting, _CHUNK))):
                waiting -= size
    return code, [bytes(content) for content in contents.values()]


def _read(pipe: int, content: bytearray, most: int) -> int:
    """Read a part of a pipe that has some; 0 at its end. What is more than may be kept is dropped."""
    part = os.read(pipe, most)
    content += part[: max(0, _MOST - len(content))]
    return len(part)


def _kill(child: subprocess.Popen[bytes]) -> bool:
    """Kill a command with its process group and its descendants; whether all of them are gone."""
    stopped: list[int] = []
    try:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGSTOP)  # not waited for yet: its id is its own
            is_whole = _stop_descendants(child.pid, stopped)
            os.killpg(child.pid, signal.SIGKILL)
            for descriptor in stopped:
                _send(descriptor, signal.SIGKILL)
            child.wait(_END_SECONDS)
            return is_whole
        child.wait(_END_SECONDS)
    except (PermissionError, subprocess.TimeoutExpired):
        return False  # another user's, or it waits in the kernel
    finally:
        for descriptor in stopped:
            os.close(descriptor)
    return True


def _stop_descendants(root: int, stopped: list[int]) -> bool:
    """Stop all descendants of a stopped process: a process that is stopped makes no others.

    Args:
        root: id of the process.
        stopped: gets a pidfd of each.

    Returns:
        Whether all could be stopped: those of another user cannot, and go on.
    """
    tree, others = {root}, set[int]()
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        fresh = [
            pid for pid, parent in _parents() if parent in tree and pid not in tree and pid not in others
        ]
        if not fresh:
            return not others
        for pid in fresh:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            # Its id may have become another's before it was opened.
            if _parent_of(pid) not in tree:
                os.close(descriptor)
            elif _send(descriptor, signal.SIGSTOP):
                tree.add(pid)
                stopped.append(descriptor)
            else:
                others.add(pid)
                os.close(descriptor)
    return False


def _send(descriptor: int, number: signal.Signals) -> bool:
    """Send a signal; False where the process is another user's."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return True  # it has ended
    except PermissionError:
        return False
    return True


def _parents() -> Iterator[tuple[int, int]]:
    """Id and parent of each process; none where the system has no ``/proc``."""
    try:
        names = [place.name for place in Path("/proc").iterdir()]
    except OSError:
        return
    for name in names:
        parent = _parent_of(int(name)) if name.isdecimal() else None
        if parent is not None:
            yield int(name), parent


def _parent_of(pid: int) -> int | None:
    """A process's parent; None where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])
