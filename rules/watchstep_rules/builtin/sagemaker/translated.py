"""Rules of Amazon's that are rules of Watchstep's with other parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from watchstep.format.block import Block
from watchstep_rules.rule import AnyRule, Finding, Params, Rule, State

P = TypeVar("P", bound=Params)


class Translated(Rule[P, State]):
    """Judges as another rule does, with that rule's parameters made of its own.

    A subclass takes the other rule's ``state_type``, ``needs``, ``merge`` and ``clock``.

    Attributes:
        inner: the other rule.
    """

    inner: ClassVar[AnyRule]

    @abstractmethod
    def translated(self, params: P) -> Params:
        """The other rule's parameters."""

    def lookback(self, params: P) -> int:
        """As the other rule's."""
        return self.inner.lookback(self.translated(params))

    def due_ns(self, params: P, state: State) -> int | None:
        """As the other rule's."""
        return self.inner.due_ns(self.translated(params), state)

    def problem(self, state: State) -> str:
        """As the other rule's."""
        return self.inner.problem(state)

    def evaluate(
        self, params: P, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge as the other rule, under this one's name."""
        state, findings = self.inner.evaluate(self.translated(params), state, context, block, now)
        return state, [finding.model_copy(update={"rule": self.name}) for finding in findings]
