"""Backend that runs the user's own commands to submit, query and stop jobs, with a deadline and without leftover processes."""

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
    """Submits, queries and stops with the user's commands. They run without a shell; use ``sh -c '…'`` to get one.

    Patterns are regular expressions that are searched for in a command's output.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 2.0
    submission_seconds: ClassVar[float] = 60.0  # the submit command outlives its launcher
    shares_files: ClassVar[bool] = True

    submit_command: str = Field(
        description="Starts a job. {command} stands for the program's words, {command_line} for the same quoted for a shell;"
        " further fields are {name}, {folder} and {log}. The job's variables are in the command's environment."
    )
    status_command: str = Field(description="Prints the status of job {id}.")
    stop_command: str = Field(description="Requests the end of job {id}.")
    kill_command: str = Field("", description="Ends job {id}; by default the stop command.")
    logs_command: str = Field(
        "", description="Prints the whole output of job {id} so far; without it, there is no output."
    )
    jobs_command: str = Field(
        "", description="Prints the ids of Watchstep's jobs that are not over, one per line."
    )
    find_command: str = Field("", description="Prints the id of the job named {name}, if there is one.")
    id_pattern: str = Field(
        r"(\S+)\s*$", description="Finds the id in the submit command's output: its first group."
    )
    started_pattern: str = Field(
        "",
        description="Finds something in the status that no later job with the same id has, such as a start time: its first group.",
    )
    exit_code_pattern: str = Field("", description="Finds the exit code in the status: its first group.")
    states: dict[str, JobState] = Field(
        default_factory=dict, description="Pattern → state; the first pattern found in the status applies."
    )
    state_codes: dict[int, JobState] = Field(
        default_factory=dict, description="Exit code of the status command → state, if no pattern is found."
    )
    down_pattern: str = Field("", description="Matches a command's output when the cluster does not answer.")
    expired_pattern: str = Field("", description="Matches a command's output when credentials have expired.")
    timeout_seconds: float = Field(20.0, gt=0, le=30, description="Timeout of a command in seconds.")

    @field_validator("id_pattern", "started_pattern", "exit_code_pattern", "down_pattern", "expired_pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a valid regular expression ({error})") from error
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
        """Run the submit command in the launch's folder, with its variables.

        Raises:
            SubmissionRejectedError: the command fails, or prints no id.
        """
        values = {"name": launch.name, "folder": str(launch.folder), "log": str(launch.log or "")}
        command = words(self.submit_command, values, launch.command)
        try:
            result = run(
                command, self.timeout_seconds, launch.folder, {**launch.environment, **launch.secrets}
            )
        except TimedOutError as error:
            return self._find_submitted(launch.name, error)
        except ConfigError as error:
            raise SubmissionRejectedError(error.what, error.hint) from error
        if result.code:
            self._check_available(result)
            raise SubmissionRejectedError(
                f"{command[0]} refused {launch.name or launch.command[0]!r}: {result.summary}",
                "correct the cause that it reports",
            )
        match = re.search(self.id_pattern, result.text)
        if match is None or not _ID.fullmatch(match[1]):
            raise SubmissionRejectedError(
                f"{command[0]} printed no id ({result.summary!r}): the job that it may have started cannot be queried",
                f"set id_pattern, which is {self.id_pattern!r}; look for the job by its name {launch.name!r}",
            )
        return self._handle(match[1], "" if launch.log is None else str(launch.log))

    def status(self, job: JobHandle) -> JobStatus:
        """Return the state that the status command prints; "vanished" if the id belongs to another job now."""
        result = self._query(self.status_command, job.id)
        state = self._state(result)
        if state is None:
            self._check_available(result)
            if result.code:
                raise BackendDownError(
                    f"job {job.id}: {result.summary}", "check the status command, or extend state_codes"
                )
            return JobStatus("unknown", detail=result.summary)
        started = job.identity.get("started", "")
        if self.started_pattern and started and state != "vanished" and self._started(result) != started:
            return JobStatus("vanished", detail=f"{job.id} is another job now")
        code = re.search(self.exit_code_pattern, result.text) if self.exit_code_pattern else None
        over = JobStatus(state).is_over
        return JobStatus(state, int(code[1]) if code and over and _is_number(code[1]) else None)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return the logs command's output after the cursor."""
        if not self.logs_command:
            return LogPart(b"", cursor)
        result = self._query(self.logs_command, job.id)
        self._check_available(result)
        start = int(cursor) if cursor.isdecimal() else 0
        return LogPart(result.output[start:], str(max(start, len(result.output))))

    def stop(self, job: JobHandle) -> JobStatus:
        """Run the stop command after verifying the job's identity."""
        return self._end(job, self.stop_command)

    def kill(self, job: JobHandle) -> JobStatus:
        """Run the kill command after verifying the job's identity."""
        return self._end(job, self.kill_command or self.stop_command)

    def jobs(self) -> list[JobHandle]:
        """List the jobs that the jobs command prints; empty without one."""
        if not self.jobs_command:
            return []
        result = self._run(self.jobs_command, {})
        self._check_available(result)
        jobs = [self._handle(name) for name in result.text.split() if _ID.fullmatch(name)]
        return [job for job in jobs if not self.status(job).is_over]

    def find(self, name: str) -> JobHandle | None:
        """Return the job that the find command prints; None if it prints nothing.

        Raises:
            BackendDownError: there is no such command, or it fails.
        """
        if not self.find_command:
            raise BackendDownError(
                f"a job {name!r} may have been started, and there is no find_command",
                "set find_command, or look for the job by its name",
            )
        result = self._run(self.find_command, {"name": name})
        self._check_available(result)
        job_id = result.text.strip()
        if result.code or (job_id and not _ID.fullmatch(job_id)):
            raise BackendDownError(
                f"job {name!r}: {self.find_command!r} printed {result.summary!r}",
                "correct the find command: it must print one id, or nothing if there is no such job",
            )
        return self._handle(job_id) if job_id else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the job that the status command knows by this id.

        Raises:
            JobNotFoundError: there is no such job.
        """
        missing = JobNotFoundError(
            f"job {id!r} is not known to {self.status_command!r}", "use an id that the command knows"
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
            ConfigError: the identity contains anything other than what ``started_pattern`` finds.
        """
        expected = {"started"} if self.started_pattern else set()
        if set(job.identity) != expected or not all(
            isinstance(value, str) for value in job.identity.values()
        ):
            raise ConfigError(
                f"job {job.id!r}: its identity has {sorted(job.identity)}", f"use exactly {sorted(expected)}"
            )
        return JobHandle(job.backend, job.id, dict(job.identity), job.details)

    def _end(self, job: JobHandle, command: str) -> JobStatus:
        before = self.status(job)
        if before.is_over or not before.is_visible:
            return before
        result = self._query(command, job.id)
        after = self.status(job)
        if result.code and not after.is_over:
            self._check_available(result)
            raise BackendError(f"job {job.id} could not be stopped: {result.summary}", f"check {command!r}")
        return after

    def _handle(self, id: str, log: str = "") -> JobHandle:  # noqa: A002 - as people call it
        identity: dict[str, Any] = {}
        if self.started_pattern:
            identity["started"] = self._started(self._query(self.status_command, id))
        return JobHandle(NAME, id, identity, {"log": log} if log else {})

    def _find_submitted(self, name: str, error: TimedOutError) -> JobHandle:
        if self.find_command and name:
            result = self._run(self.find_command, {"name": name})
            if not result.code and _ID.fullmatch(result.text.strip()):
                return self._handle(result.text.strip())
            if not result.code and not result.text.strip():
                raise BackendDownError(f"{error.what}; job {name!r} was not started", error.hint) from error
        raise BackendDownError(
            f"{error.what}; job {name!r} may have been started", f"look for it, and {error.hint}"
        ) from error

    def _started(self, result: CommandResult) -> str:
        match = re.search(self.started_pattern, result.text)
        return match[1] if match else ""

    def _state(self, result: CommandResult) -> JobState | None:
        for pattern, state in self.states.items():
            if re.search(pattern, result.text):
                return state
        return self.state_codes.get(result.code)

    def _check_available(self, result: CommandResult) -> None:
        output = result.text + result.errors
        if self.expired_pattern and re.search(self.expired_pattern, output):
            raise CredentialsExpiredError(result.summary, "renew the credentials, and try again")
        if self.down_pattern and re.search(self.down_pattern, output):
            raise BackendDownError(result.summary, "try again later")

    def _query(self, template: str, id: str) -> CommandResult:  # noqa: A002 - as people call it
        if not _ID.fullmatch(id):
            raise ConfigError(f"{id!r} is not a valid job id for a command", "bind the job by its id")
        return self._run(template, {"id": id})

    def _run(self, template: str, values: dict[str, str]) -> CommandResult:
        return run(words(template, values), self.timeout_seconds, Path("/"), {})


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,9}", text) is not None


_MAX_OUTPUT = 16 * 1024 * 1024
_CHUNK = 64 * 1024
_POLL_SECONDS = 0.05
"""How often to check whether a command has ended while its outputs are open."""
_END_SECONDS = 5.0
"""How long to wait for a killed process."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        """The output as text."""
        return self.output.decode("utf-8", "replace")

    @property
    def summary(self) -> str:
        """The command's message in one line, or its exit code."""
        return " ".join((self.errors or self.text).split())[:500] or f"exit code {self.code}"


class TimedOutError(BackendDownError):
    """A command exceeded its timeout and was killed. Its effects until then are unknown."""


def words(template: str, values: Mapping[str, str], command: Sequence[str] = ()) -> list[str]:
    """Split a template into words. There is no shell: a value is one word or a part of one, whatever it contains.

    Args:
        template: its ``{names}`` are replaced; a word ``{command}`` becomes all words of the program, and
            ``{command_line}`` the same, quoted for a shell.
        values: name → text.
        command: the program and its arguments.

    Raises:
        ConfigError: the template cannot be split, or contains an unknown name.
    """
    fields = {**values, "command_line": shlex.join(command)} if command else dict(values)
    result: list[str] = []
    try:
        for word in shlex.split(template):
            result += command if word == "{command}" and command else [word.format_map(fields)]
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        names = ", ".join(f"{{{name}}}" for name in [*fields, *(["command"] if command else [])])
        raise ConfigError(
            f"command {template!r}: cannot be parsed ({error!r})", f"it may contain {names}"
        ) from error
    if not result:
        raise ConfigError(f"command {template!r} is empty", "name a program")
    return result


def run(
    command: Sequence[str], seconds: float, folder: Path, environment: Mapping[str, str]
) -> CommandResult:
    """Run a command to its end.

    A command has ended once its own process has, even if a background process still has its outputs open: the result is
    what was written by then, and the outputs are closed. The first 16 MiB of each output are kept; the rest is read and
    dropped.

    Raises:
        ConfigError: the program does not exist.
        TimedOutError: the command exceeds the timeout. It was killed, with its process group and with all current descendants in
            any session. A process that lost its parent earlier, such as a daemon, is not recognized as the command's, and
            continues.
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
            code, (output_bytes, error_output) = _follow(child, (output.fileno(), errors.fileno()), seconds)
        except subprocess.TimeoutExpired:
            unkilled = "" if _kill(child) else f"; process {child.pid} could not be ended"
            raise TimedOutError(
                f"command {command[0]!r}: no answer in {seconds:g} s{unkilled}",
                "try again, or increase timeout_seconds",
            ) from None
    return CommandResult(code, output_bytes, error_output.decode("utf-8", "replace"))


def _follow(child: subprocess.Popen[bytes], pipes: Sequence[int], seconds: float) -> tuple[int, list[bytes]]:
    """Return a command's exit code, and the beginning of what it wrote to each pipe.

    Raises:
        subprocess.TimeoutExpired: the command is still running.
    """
    deadline = time.monotonic() + seconds
    contents = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        # Other processes may keep the pipes open, so their end is not awaited once the command itself has ended.
        while selector.get_map() and child.poll() is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired(child.args, seconds)
            for key, _ in selector.select(min(remaining, _POLL_SECONDS)):
                if not _read(key.fd, contents[key.fd], _CHUNK):
                    selector.unregister(key.fd)
        code = child.wait(max(0.0, deadline - time.monotonic()))
        for pipe in [key.fd for key in selector.get_map().values()]:
            waiting = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(struct.calcsize("i"))))[0]
            while waiting > 0 and (size := _read(pipe, contents[pipe], min(waiting, _CHUNK))):
                waiting -= size
    return code, [bytes(content) for content in contents.values()]


def _read(pipe: int, content: bytearray, most: int) -> int:
    """Read a part of a readable pipe. Returns its size, 0 at the end. Data beyond the limit is dropped."""
    part = os.read(pipe, most)
    content += part[: max(0, _MAX_OUTPUT - len(content))]
    return len(part)


def _kill(child: subprocess.Popen[bytes]) -> bool:
    """Kill a command with its process group and its descendants. Returns whether all of them have ended."""
    stopped: list[int] = []
    try:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGSTOP)  # not reaped yet, so its id cannot be reused
            all_stopped = _stop_descendants(child.pid, stopped)
            os.killpg(child.pid, signal.SIGKILL)
            for descriptor in stopped:
                _send(descriptor, signal.SIGKILL)
            child.wait(_END_SECONDS)
            return all_stopped
        child.wait(_END_SECONDS)
    except (PermissionError, subprocess.TimeoutExpired):
        return False  # another user's process, or blocked in the kernel
    finally:
        for descriptor in stopped:
            os.close(descriptor)
    return True


def _stop_descendants(root: int, stopped: list[int]) -> bool:
    """Stop all descendants of a stopped process; a stopped process creates no others.

    Args:
        root: id of the process.
        stopped: receives a pidfd for each of them.

    Returns:
        Whether all could be stopped. Processes of another user cannot, and continue.
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
            # Another process may have got its id before it was opened.
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
    """Send a signal. Returns False if the process belongs to another user."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return True  # it has ended
    except PermissionError:
        return False
    return True


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the id and parent of each process; nothing on systems without ``/proc``."""
    try:
        names = [path.name for path in Path("/proc").iterdir()]
    except OSError:
        return
    for name in names:
        parent = _parent_of(int(name)) if name.isdecimal() else None
        if parent is not None:
            yield int(name), parent


def _parent_of(pid: int) -> int | None:
    """Return a process's parent; None if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])
