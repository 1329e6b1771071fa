"""Inhibition: while the alert of one rule config fires, alerts that only follow from it are not notified.

Alerts change their phases as usual; inhibition suppresses the notification. A target that begins to fire at a step at which a source
fires is inhibited. It is notified at the first later step at which no source fires, if it still fires then.

Only rules that wait for the watermark can be targets: when the watermark passes a step, everything that a source can report about it
was reported, in whatever order rows arrived. The same rows therefore give the same events in blocks of any size. A source in dry-run
mode inhibits nothing. Sources that inhibit each other, directly or through others, are ignored, because nobody would be notified.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import AlertMemory, FiringSpan, InhibitedBy, Phase, Transition

MAX_FIRING_SPANS = 64
"""Limit of firing spans that are kept of a source, the latest; more than one is needed only while rows after the watermark are judged."""


@dataclass(frozen=True)
class AlertUpdate:
    """The transitions of one rule config's alert in an evaluation, and its new state."""

    config: RuleConfig
    memory: AlertMemory
    transitions: Sequence[Transition]


def can_be_inhibited(config: RuleConfig) -> bool:
    """Whether a rule config waits for the watermark, and therefore for other rule configs."""
    rule = config.implementation
    try:
        return rule.merged(config.parameters) == "watermark" and not rule.clock
    except ValueError:
        return False  # its evaluation reports the invalid parameters


def inhibitions(configs: Sequence[RuleConfig]) -> list[tuple[int, int]]:
    """Pairs (source, target) of indices of rule configs; pairs within a cycle are left out."""
    edges = _edges(configs)
    component = _components(len(configs), edges)
    return [(source, target) for source, target in edges if component[source] != component[target]]


_CACHED = 64
_cache: OrderedDict[tuple[int, ...], tuple[tuple[RuleConfig, ...], list[tuple[int, int]]]] = OrderedDict()


def _cached_inhibitions(configs: tuple[RuleConfig, ...]) -> list[tuple[int, int]]:
    """`inhibitions`, cached by the identity of the rule configs: most runs have the same few, and each of their evaluations needs them."""
    key = tuple(map(id, configs))
    entry = _cache.get(key)
    if entry is None:
        # The reference to the configs keeps their ids from being reused.
        entry = _cache[key] = (configs, inhibitions(configs))
        while len(_cache) > _CACHED:
            with suppress(KeyError):  # another thread has removed it
                _cache.popitem(last=False)
    return entry[1]


def cycles(configs: Sequence[RuleConfig]) -> list[list[int]]:
    """Groups of rule configs that inhibit each other, directly or through others, by their indices."""
    components = _components(len(configs), _edges(configs))
    members: dict[int, list[int]] = {}
    for index, component in enumerate(components):
        members.setdefault(component, []).append(index)
    return [indices for indices in members.values() if len(indices) > 1]


def _edges(configs: Sequence[RuleConfig]) -> list[tuple[int, int]]:
    sources = [
        (index, config) for index, config in enumerate(configs) if config.inhibits and not config.dry_run
    ]
    if not sources:
        return []
    targets: dict[str, set[int]] = {}
    for index, config in enumerate(configs):
        if can_be_inhibited(config):
            targets.setdefault(config.name, set()).add(index)
            targets.setdefault(config.rule, set()).add(index)
    return [
        (source, target)
        for source, config in sources
        for target in sorted(
            {index for name in config.inhibits for index in targets.get(name, ())} - {source}
        )
    ]


def _components(number: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The strongly connected component of each node, by Kosaraju's algorithm."""
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
    component = [-1] * number
    seen = [False] * number
    for start in reversed(finished):
        if not seen[start]:
            for node in _walk(start, back, seen):
                component[node] = start
    return component


def _walk(start: int, following: list[list[int]], seen: list[bool]) -> list[int]:
    """All nodes that can be reached and were not seen, each after its successors."""
    finished = []
    seen[start] = True
    path = [(start, iter(following[start]))]
    while path:
        rest = path[-1][1]
        successor = next((node for node in rest if not seen[node]), None)
        if successor is None:
            finished.append(path.pop()[0])
        else:
            seen[successor] = True
            path.append((successor, iter(following[successor])))
    return finished


def inhibit(updates: Sequence[AlertUpdate], watermark: int) -> list[AlertUpdate]:
    """Mark transitions of alerts that only follow from another firing alert as inhibited.

    Args:
        updates: the updates of all rule configs of an attempt in this evaluation.
        watermark: the last step that all live workers passed.

    Returns:
        The updates in the same order. An inhibited transition names the rule config that inhibits it. A transition to *firing* is added
        at the step at which the inhibition ends.
    """
    edges = _cached_inhibitions(tuple(update.config for update in updates))
    fired = {source: _fired(updates[source]) for source, _ in edges}
    sources_of: dict[int, list[tuple[str, FiringSpan]]] = {}
    for source, target in edges:
        spans = sources_of.setdefault(target, [])
        spans.extend((updates[source].config.name, span) for span in fired[source])
    result = []
    for index, update in enumerate(updates):
        sources = sources_of.get(index, [])
        needed = [span for span in fired.get(index, ()) if span.until is None or span.until > watermark]
        memory = update.memory
        if memory.firing_spans or needed:
            memory = memory.model_copy(update={"firing_spans": tuple(needed[-MAX_FIRING_SPANS:])})
        if (sources and update.transitions) or memory.inhibition is not None:
            result.append(_inhibited(replace(update, memory=memory), sources, watermark))
        else:
            result.append(update if memory is update.memory else replace(update, memory=memory))
    return result


def _fired(update: AlertUpdate) -> list[FiringSpan]:
    """The firing spans of a source, from its state and its new transitions."""
    spans = list(update.memory.firing_spans)
    for change in update.transitions:
        if change.phase is Phase.FIRING and not change.revised:
            spans.append(FiringSpan(change.step, None))
        elif change.phase is Phase.FIRING and spans:
            spans[-1] = spans[-1]._replace(first=min(spans[-1].first, change.step))
        elif change.phase is Phase.RESOLVED and spans:
            spans[-1] = FiringSpan(spans[-1].first, change.step)
    return spans


_Sources = Sequence[tuple[str, FiringSpan]]


def _inhibited(update: AlertUpdate, sources: _Sources, watermark: int) -> AlertUpdate:
    """Apply the firing spans of its sources to the transitions of a target."""
    inhibition = update.memory.inhibition
    transitions: list[Transition] = []
    for change in update.transitions:
        if change.phase is Phase.FIRING and not change.revised:
            by = next((name for name, span in sources if _covers(span, change.step)), "")
            inhibition = InhibitedBy(by, change.step) if by else None
        elif change.phase is Phase.RESOLVED and inhibition is not None:
            free = _free(inhibition.step, sources)[0]
            if free is not None and free < change.step:
                transitions.append(replace(change, phase=Phase.FIRING, step=free))
                inhibition = None
        inhibited = change.phase in (Phase.FIRING, Phase.RESOLVED) and inhibition is not None
        transitions.append(
            replace(change, inhibited_by=inhibition.by) if inhibited and inhibition else change
        )
        if change.phase is Phase.RESOLVED:
            inhibition = None
    if inhibition is not None:
        free, reached = _free(inhibition.step, sources)
        if free is not None and free <= watermark:
            streak = update.memory.streak
            transitions.append(
                Transition(Phase.FIRING, free, update.memory.finding, streak.first, streak.time_ns)
            )
            inhibition = None
        else:
            inhibition = InhibitedBy(inhibition.by, reached)
    memory = update.memory.model_copy(update={"inhibition": inhibition})
    return replace(update, memory=memory, transitions=transitions)


def _covers(span: FiringSpan, step: int) -> bool:
    return span.first <= step and (span.until is None or step < span.until)


def _free(step: int, sources: _Sources) -> tuple[int | None, int]:
    """The first step from ``step`` on at which no source fires, or None if it is not known yet; and the last step before it."""
    reached = step
    while True:
        ends = [span.until for _, span in sources if _covers(span, step)]
        if not ends:
            return step, reached
        reached = step
        known = [until for until in ends if until is not None]
        if not known:
            return None, reached
        step = max(known)
        reached = step - 1
