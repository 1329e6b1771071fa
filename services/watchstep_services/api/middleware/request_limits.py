"""Limits of the size of requests, the text of their bodies, and limits of concurrent requests that wait for other systems.

Size: address, headers, body, and nesting depth of the body's JSON. Servers have different limits of their own, and some have none.

Text: UTF-8 without unpaired surrogates. Python's JSON parser accepts others, but neither databases nor responses can contain them.

Concurrency: requests that wait for a checking process, a receiver or a store occupy a thread of the pool that all requests share.
If no slot is free, such a request is refused with 429 at once. Registrations of runs have threads of their own, and wait for one for some
seconds without occupying another.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.registry import KINDS
from watchstep_rules.rule_files import rule_file
from watchstep_services.api.queries.state import Slots
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.core.fair_threads import FairThreads

MOST_PATH = 4 * 1024
MOST_QUERY = 16 * 1024
MOST_HEADERS = 100
MOST_HEADER_BYTES = 32 * 1024
MOST_BODY = 1024 * 1024
MOST_DEPTH = 64
"""More than any valid document needs, and far below the recursion limit of the interpreter."""

MOST_CONTAINERS = 50_000
"""Lists and objects in a body. A rule file of a thousand rules has some thousands. Parsing them blocks all other requests."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)

_SURROGATES = (b"\\ud", b"\\uD")
_PAIRED = re.compile(
    rb"\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})", re.DOTALL
)
"""An escape that is not half of a surrogate pair, or both halves of one."""

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


_SINGLE = frozenset(
    (b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key", b"transfer-encoding")
)
"""Headers that a request may have once. Of several, a proxy and the service could obey different ones."""


def check_head(scope: Scope) -> None:
    """Check the size of the address and the headers, and that no header is ambiguous.

    Raises:
        RequestRefusedError: 400, 414 or 431.
    """
    for what, size, most in (
        ("path", len(scope.get("raw_path") or scope["path"]), MOST_PATH),
        ("query", len(scope["query_string"]), MOST_QUERY),
    ):
        if size > most:
            raise RequestRefusedError(
                414, f"{what}: {size} bytes, over the limit of {most}", "split the request"
            )
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MOST_HEADERS or size > MOST_HEADER_BYTES:
        raise RequestRefusedError(
            431,
            f"{len(headers)} headers of {size} bytes: over the limit of {MOST_HEADERS} headers and {MOST_HEADER_BYTES} bytes",
            "send fewer or shorter headers",
        )
    names = [name for name, _ in headers if name in _SINGLE]
    if len(names) > len(set(names)):
        repeated = next(name for name in names if names.count(name) > 1).decode()
        raise RequestRefusedError(
            400,
            f"header {repeated}: {names.count(repeated.encode())} times, which of them applies is not defined",
            "send it once; a proxy in front of the service may have added one",
        )


def check_length(scope: Scope, most: int) -> None:
    """Check the Content-Length of a body.

    Raises:
        RequestRefusedError: 413, the body is too large.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise RequestRefusedError(413, *_too_large(most))


def limited(receive: Receive, most: int, *, any_text: bool = False) -> Receive:
    """Return a receiver that limits size and depth of a body, independent of its Content-Length, and checks its text.

    The receiver raises an `HTTPException`, which all readers of a body propagate.

    Args:
        receive: the receiver of the body.
        most: maximum size in bytes.
        any_text: whether the body may have unpaired surrogates.
    """
    body = bytearray()

    async def receive_limited() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.extend(message.get("body", b""))
            if len(body) > most:
                body.clear()
                raise HTTPException(413, ": ".join(_too_large(most)))
            if message.get("more_body", False):
                return message
            if depth_of(bytes(body)) > MOST_DEPTH:
                raise HTTPException(
                    422, f"body: nested deeper than {MOST_DEPTH} levels: no valid request needs more"
                )
            if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:
                raise HTTPException(
                    422, f"body: more than {MOST_CONTAINERS} lists and objects: split the request"
                )
            if not any_text and not is_text(bytes(body)):
                raise HTTPException(
                    422, "body: not UTF-8, or a text has an unpaired surrogate: remove that character"
                )
        return message

    return receive_limited


def depth_of(body: bytes) -> int:
    """Return the nesting depth of lists and objects in JSON; for invalid JSON, an upper bound."""
    if body.count(b"[") + body.count(b"{") <= MOST_DEPTH:
        return 0  # within the limit, whatever the depth
    signs = np.frombuffer(_STRING.sub(b"", body), dtype=np.uint8)
    return max(0, int(np.cumsum(_STEPS[signs], dtype=np.int32).max(initial=0)))


def is_text(body: bytes) -> bool:
    """Return whether JSON is in UTF-8 and has no unpaired surrogates, written as bytes or as escapes."""
    if b"\0" in body:
        return False  # UTF-16 or UTF-32
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    if not any(escape in body for escape in _SURROGATES):
        return True
    rest = _PAIRED.sub(b"", body)
    return not any(escape in rest for escape in _SURROGATES)


def _too_large(most: int) -> tuple[str, str]:
    return f"body: over the limit of {most} bytes", "split the request"


_TESTS_OF_PROJECT, _TESTS = 2, 6
_STORE_CHECKS_OF_PROJECT, _STORE_CHECKS = 2, 4

_REGISTRATIONS_OF_PROJECT, _REGISTRATIONS = 1, 4
"""Threads that register runs. A hundred rules, of the request or of the run, take some tenths of a second of the interpreter and the
database's write lock, for which the stops of all projects wait."""

REGISTRATION_SECONDS = 2.0
"""How long a registration waits for the others of its project, of which hundreds may start in the same second. Recorders wait 5 s for an
answer."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class WorkSlots:
    """Slots of one process.

    Attributes:
        rule_checks: checks of rules in a separate process; one project may use half of these processes.
        receiver_tests: tests of receivers.
        store_checks: checks of stores.
        registrations: threads that register runs, fairly by project.
    """

    rule_checks: Slots
    receiver_tests: Slots
    store_checks: Slots
    registrations: FairThreads

    @classmethod
    def of_process(cls) -> WorkSlots:
        """Create slots that match the number of processes for checks."""
        processes = POOL.processes["checks"]
        return cls(
            Slots(max(1, processes // 2), max(2, processes), "rule checks"),
            Slots(_TESTS_OF_PROJECT, _TESTS, "receiver tests"),
            Slots(_STORE_CHECKS_OF_PROJECT, _STORE_CHECKS, "store checks"),
            FairThreads(_REGISTRATIONS, "watchstep-registration", _REGISTRATIONS_OF_PROJECT),
        )

    def checked_rules(self, project: str, rules: Sequence[Any]) -> tuple[RuleConfig, ...]:
        """Check the rule configs of a request like those of a rule file.

        Raises:
            BusyError: a query cannot be checked now.
            RequestRefusedError: 429; too many checks are in progress.
            RuleError: the rule configs are not valid.
        """
        with self.checking(project, _kinds_in(rules)):
            return check_rules(rules)

    async def register(self, project: str, rules: Sequence[Any], work: Callable[[], _Result]) -> _Result:
        """Check the rule configs of a registration and register the run, one run of a project at a time.

        Rules that are checked in a separate process have the slot of the check instead, because they would delay the project's other runs.

        Args:
            project: name of the project.
            rules: rule configs of the request.
            work: checks and registers; called in a thread.

        Raises:
            RequestRefusedError: 429; too many other registrations wait, or too many checks are in progress.
        """
        kinds = _kinds_in(rules)
        if _has_process(kinds):
            with self.checking(project, kinds):
                return await run_in_threadpool(work)
        context = contextvars.copy_context()  # log fields and the trace
        registration = self.registrations.submit(project, partial(context.run, work))
        result = asyncio.wrap_future(registration)
        await asyncio.wait([result], timeout=REGISTRATION_SECONDS)
        if not result.done() and registration.cancel():
            raise RequestRefusedError(
                429,
                f"too many registrations of project {project} are in progress",
                "repeat the request after one of them has ended",
            )
        return await result

    def checking(self, project: str, kinds: Sequence[object]) -> AbstractContextManager[object]:
        """Return a context in which rules may be checked: with a slot if the check of one of them needs a separate process.

        Raises:
            RequestRefusedError: 429; too many checks are in progress.
        """
        if _has_process(kinds):
            return self.rule_checks.acquire(project)
        return nullcontext()


def check_rules(rules: Sequence[Any]) -> tuple[RuleConfig, ...]:
    """Check the rule configs of a request like those of a rule file, in the work of `WorkSlots.register`.

    Raises:
        BusyError: a query cannot be checked now.
        RuleError: the rule configs are not valid.
    """
    return rule_file.check({"rules": list(rules)}, "of the request")


def _kinds_in(rules: Sequence[Any]) -> list[object]:
    return [rule.get("rule") for rule in rules if isinstance(rule, dict)]


def _has_process(kinds: Sequence[object]) -> bool:
    return any(isinstance(name, str) and name in KINDS for name in kinds)


async def _work_slots(request: Request) -> WorkSlots:
    slots = request.app.state.work_slots
    assert isinstance(slots, WorkSlots)
    return slots


Working = Annotated[WorkSlots, Depends(_work_slots)]
