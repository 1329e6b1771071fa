"""Inhibition: while the alert of one rule config fires, alerts that only follow from it are not notified.

Alerts change their phases as usual; inhibition suppresses the notification. A target that begins to fire at a step at which a source
fires is inhibited. It is notified at the first later step at which no source fires, if it still fires then.

Only rules that wait for the watermark can be targets: when the watermark passes a step, everything that a source can report about it
was reported, in whatever order rows arrived. The same rows therefore give the same events in blocks of any size. A source in dry-run
mode inhibits nothing. Sources that inhibit each other, directly or through others, are ignored, because nobody would be notified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import AlertMemory, FiringSpan, Phase, Quiet, Transition

MOST_INTERVALS = 64
"""Of firing that are kept of a source, the latest; more than one matters only while it is ahead of the seals."""


@dataclass(frozen=True)
class Told:
    """What one rule config's alert did in an evaluation."""

    config: RuleConfig
    memory: AlertMemory
    transitions: Sequence[Transition]


def can_be_inhibited(config: RuleConfig) -> bool:
    """Whether a rule config waits for seals, and so for others."""
    rule = config.implementation
    return rule.merged(config.parameters) == "sealed" and not rule.clock


def inhibitions(configs: Sequence[RuleConfig]) -> list[tuple[int, int]]:
    """Which rule config inhibits which, by their places; those that go round in a circle are left out."""
    edges = _edges(configs)
    of = _circle_of(len(configs), edges)
    return [(source, target) for source, target in edges if of[source] != of[target]]


def circles(configs: Sequence[RuleConfig]) -> list[list[int]]:
    """Rule configs that inhibit each other, at once or through others, by their places."""
    of = _circle_of(len(configs), _edges(configs))
    members: dict[int, list[int]] = {}
    for place, circle in enumerate(of):
        members.setdefault(circle, []).append(place)
    return [circle for circle in members.values() if len(circle) > 1]


def _edges(configs: Sequence[RuleConfig]) -> list[tuple[int, int]]:
    sources = [(place, one) for place, one in enumerate(configs) if one.inhibits and not one.dry_run]
    if not sources:
        return []
    called: dict[str, set[int]] = {}
    for place, one in enumerate(configs):
        if can_be_inhibited(one):
            called.setdefault(one.name, set()).add(place)
            called.setdefault(one.rule, set()).add(place)
    return [
        (source, target)
        for source, one in sources
        for target in sorted({place for name in one.inhibits for place in called.get(name, ())} - {source})
    ]


def _circle_of(number: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """For each place the circle that it is in, by a number; strongly connected components, after Kosaraju."""
    onward: list[list[int]] = [[] for _ in range(number)]
    back: list[list[int]] = [[] for _ in range(number)]
    for source, target in edges:
        onward[source].append(target)
        back[target].append(source)
    seen = [False] * number
    finished: list[int] = []
    for start in range(number):
        if not seen[start]:
            finished += _walk(start, onward, seen)
    circle = [-1] * number
    seen = [False] * number
    for start in reversed(finished):
        if not seen[start]:
            for place in _walk(start, back, seen):
                circle[place] = start
    return circle


def _walk(start: int, following: list[list[int]], seen: list[bool]) -> list[int]:
    """All places that can be reached and were not seen, each after those that it leads to."""
    finished = []
    seen[start] = True
    path = [(start, iter(following[start]))]
    while path:
        rest = path[-1][1]
        ahead = next((one for one in rest if not seen[one]), None)
        if ahead is None:
            finished.append(path.pop()[0])
        else:
            seen[ahead] = True
            path.append((ahead, iter(following[ahead])))
    return finished


def inhibit(told: Sequence[Told], sealed: int) -> list[Told]:
    """Keep quiet what only follows from something else.

    Args:
        told: what the alerts of all rule configs of an attempt did in this evaluation.
        sealed: the last step that is sealed.

    Returns:
        The same, in the same order. Transitions that nobody is told of name the rule config that inhibits them; one to
        *firing* is added where it ends, at the step at which it does.
    """
    edges = inhibitions([one.config for one in told])
    fired = {source: _fired(told[source]) for source, _ in edges}
    of: dict[int, list[tuple[str, FiringSpan]]] = {}
    for source, target in edges:
        of.setdefault(target, []).extend((told[source].config.name, interval) for interval in fired[source])
    result = []
    for place, one in enumerate(told):
        sources = of.get(place, [])
        kept = [
            interval for interval in fired.get(place, ()) if interval.until is None or interval.until > sealed
        ]
        memory = one.memory
        if memory.fired or kept:
            memory = memory.model_copy(update={"fired": tuple(kept[-MOST_INTERVALS:])})
        if (sources and one.transitions) or memory.quiet is not None:
            result.append(_followed(replace(one, memory=memory), sources, sealed))
        else:
            result.append(one if memory is one.memory else replace(one, memory=memory))
    return result


def _fired(one: Told) -> list[FiringSpan]:
    """When a source fired: what it remembers, and what is new."""
    intervals = list(one.memory.fired)
    for change in one.transitions:
        if change.phase is Phase.FIRING and not change.revised:
            intervals.append(FiringSpan(change.step, None))
        elif change.phase is Phase.FIRING and intervals:
            intervals[-1] = intervals[-1]._replace(first=min(intervals[-1].first, change.step))
        elif change.phase is Phase.RESOLVED and intervals:
            intervals[-1] = FiringSpan(intervals[-1].first, change.step)
    return intervals


_Sources = Sequence[tuple[str, FiringSpan]]


def _followed(one: Told, sources: _Sources, sealed: int) -> Told:
    """A target's alert through its changes."""
    quiet = one.memory.quiet
    transitions: list[Transition] = []
    for change in one.transitions:
        if change.phase is Phase.FIRING and not change.revised:
            by = next((name for name, interval in sources if _covers(interval, change.step)), "")
            quiet = Quiet(by, change.step) if by else None
        elif change.phase is Phase.RESOLVED and quiet is not None:
            free = _free(quiet.step, sources)[0]
            if free is not None and free < change.step:
                transitions.append(replace(change, phase=Phase.FIRING, step=free))
                quiet = None
        inhibited = change.phase in (Phase.FIRING, Phase.RESOLVED) and quiet is not None
        transitions.append(replace(change, inhibited_by=quiet.by) if inhibited and quiet else change)
        if change.phase is Phase.RESOLVED:
            quiet = None
    if quiet is not None:
        free, reached = _free(quiet.step, sources)
        if free is not None and free <= sealed:
            since = one.memory.since
            transitions.append(Transition(Phase.FIRING, free, one.memory.finding, since.first, since.time_ns))
            quiet = None
        else:
            quiet = Quiet(quiet.by, reached)
    return replace(one, memory=one.memory.model_copy(update={"quiet": quiet}), transitions=transitions)


def _covers(interval: FiringSpan, step: int) -> bool:
    return interval.first <= step and (interval.until is None or step < interval.until)


def _free(step: int, sources: _Sources) -> tuple[int | None, int]:
    """The first step from one on at which no source fires, None if that is not known yet; and the last one before."""
    reached = step
    while True:
        ends = [interval.until for _, interval in sources if _covers(interval, step)]
        if not ends:
            return step, reached
        reached = step
        if any(until is None for until in ends):
            return None, reached
        step = max(until for until in ends if until is not None)
        reached = step - 1
