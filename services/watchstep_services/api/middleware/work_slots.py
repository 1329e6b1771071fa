"""How many requests that wait for others are under way at once: for a checking process, a receiver, a store.

Each occupies a thread of the pool that all requests share. So those that find no place are refused with 429 at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.registry import KINDS
from watchstep_rules.rule_files import rule_file
from watchstep_services.api.queries.slots import Slots

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
