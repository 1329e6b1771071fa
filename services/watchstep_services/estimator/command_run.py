"""Running a command of the user's own, within a time, and leaving nothing of it behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import ConfigError
from watchstep_services.estimator.errors import BackendDownError

_MOST = 16 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
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
    """A command did not end in time. It was ended; what it had done by then is not known."""


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


def run(command: Sequence[str], seconds: float, folder: Path, environment: Mapping[str, str]) -> Answer:
    """Run a command to its end.

    Raises:
        ConfigError: there is no such program.
        TimedOutError: it takes longer than so many seconds.
    """
    try:
        with subprocess.Popen(  # noqa: S603 - running the user's command is what this is for
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
            env={**os.environ, **environment}, start_new_session=True,
        ) as child:  # fmt: skip
            try:
                output, errors = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # not waited for yet: its id is its own
                child.communicate()
                raise TimedOutError(
                    f"command {command[0]!r}: no answer in {seconds:g} s",
                    "try again, or give it more timeout_seconds",
                ) from None
    except OSError as error:
        raise ConfigError(
            f"command {command[0]!r}: cannot be started ({error.strerror})", "check its name, and PATH"
        ) from error
    return Answer(child.returncode, output[:_MOST], errors[:_MOST].decode("utf-8", "replace"))
