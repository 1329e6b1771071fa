"""How large a request may be: its address, its headers, its body, and how deep the body's JSON may nest.

Servers have limits of their own, but not all of them, and not the same ones.

How many requests that wait for others are under way at once: for a checking process, a receiver, a store.

Each occupies a thread of the pool that all requests share. So those that find no place are refused with 429 at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.registry import KINDS
from watchstep_rules.rule_files import rule_file
from watchstep_services.api.queries.state import Slots
from watchstep_services.api.schemas.problems import RequestRefusedError

MOST_PATH = 4 * 1024
MOST_QUERY = 16 * 1024
MOST_HEADERS = 100
MOST_HEADER_BYTES = 32 * 1024
MOST_BODY = 1024 * 1024
MOST_DEPTH = 64
"""More than any document of ours has, and far less than what the interpreter can follow."""

MOST_CONTAINERS = 50_000
"""Lists and objects of a body. A rule file of a thousand rules has some thousands; each costs time that no other request gets."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def check_head(scope: Scope) -> None:
    """Refuse an address or headers that are too large.

    Raises:
        RefusedError: 414 or 431.
    """
    for what, size, most in (
        ("path", len(scope.get("raw_path") or scope["path"]), MOST_PATH),
        ("query", len(scope["query_string"]), MOST_QUERY),
    ):
        if size > most:
            raise RequestRefusedError(
                414, f"{what} of {size} bytes, over the limit of {most}", "ask for less at once"
            )
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MOST_HEADERS or size > MOST_HEADER_BYTES:
        raise RequestRefusedError(
            431,
            f"{len(headers)} headers of {size} bytes, over the limit of {MOST_HEADERS} and {MOST_HEADER_BYTES}",
            "send fewer or shorter ones",
        )


def check_length(scope: Scope, most: int) -> None:
    """Refuse a body that says that it is too large.

    Raises:
        RefusedError: 413.
    """
    said = Headers(scope=scope).get("content-length", "")
    if said.isascii() and said.isdigit() and int(said[:20]) > most:
        raise RequestRefusedError(413, *_too_large(most))


def limited(receive: Receive, most: int) -> Receive:
    """Receives a body of so many bytes at the most, and of so much depth, whatever was said of its length.

    The receiver raises an `HTTPException`: it is what every reader of a body lets pass.
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
                    422, f"body: nests more than {MOST_DEPTH} deep: nothing that this service takes does"
                )
            if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:
                raise HTTPException(
                    422, f"body: more than {MOST_CONTAINERS} lists and objects: send less at once"
                )
        return message

    return receive_limited


def depth_of(body: bytes) -> int:
    """How deep lists and objects nest in JSON; of what is none, a bound."""
    if body.count(b"[") + body.count(b"{") <= MOST_DEPTH:
        return 0  # as good as any depth that is allowed
    signs = np.frombuffer(_STRING.sub(b"", body), dtype=np.uint8)
    return max(0, int(np.cumsum(_STEPS[signs], dtype=np.int32).max(initial=0)))


def _too_large(most: int) -> tuple[str, str]:
    return f"body over the limit of {most} bytes", "send less at once"


_TESTS_OF_PROJECT, _TESTS = 2, 6
_STORE_CHECKS_OF_PROJECT, _STORE_CHECKS = 2, 4


@dataclass(frozen=True)
class WorkSlots:
    """Places of one process.

    Attributes:
        rule_checks: for checks of rules that are checked in a process of their own; half of those processes for one project.
        receiver_tests: for tests of receivers.
        store_checks: for checks of stores.
    """

    rule_checks: Slots
    receiver_tests: Slots
    store_checks: Slots

    @classmethod
    def of_process(cls) -> WorkSlots:
        """Those that fit the processes for checks."""
        processes = POOL.processes["checks"]
        return cls(
            Slots(max(1, processes // 2), max(2, processes), "checks of rules"),
            Slots(_TESTS_OF_PROJECT, _TESTS, "tests of receivers"),
            Slots(_STORE_CHECKS_OF_PROJECT, _STORE_CHECKS, "checks of stores"),
        )

    def checked_rules(self, project: str, rules: Sequence[Any]) -> tuple[RuleConfig, ...]:
        """Rule configs of a request, checked as those of a rule file.

        Raises:
            BusyError: a query cannot be checked now.
            RefusedError: 429; too many checks are under way.
            RuleError: they are not valid.
        """
        data = {"rules": list(rules)}
        named = [rule.get("rule") for rule in rules if isinstance(rule, dict)]
        if not any(isinstance(name, str) and name in KINDS for name in named):
            return rule_file.check(data, "of the request")
        with self.rule_checks.taken(project):
            return rule_file.check(data, "of the request")


async def _work_slots(request: Request) -> WorkSlots:
    slots = request.app.state.work_slots
    assert isinstance(slots, WorkSlots)
    return slots


Working = Annotated[WorkSlots, Depends(_work_slots)]
