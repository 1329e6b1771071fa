"""Running a command of the user's own, within a time, and leaving nothing of it behind."""

from __future__ import annotations

import fcntl
import os
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

from watchstep.errors import ConfigError
from watchstep_launch.errors import BackendDownError

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
