"""Needs of rules: what they add to the configuration of a recording, at its start or while it runs, and what the recorder cannot provide.

At the start, a rule can add collections, probes and full tensors. Later it can only add full tensors to a configured collection: probes
and new collections need hooks that are registered when a model is watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from watchstep.capture.config import ADAPTIVE, BUILT_IN, FIGURES_ONLY, Cadence, CaptureConfig, Collection
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.tensors import MODES

_MAX_PROBLEMS = 5


def with_needs(config: CaptureConfig, needs: Sequence[CaptureNeed]) -> CaptureConfig:
    """Return the configuration with everything that rules need and that can be captured.

    Of two cadences for the full tensors of a collection, the more frequent one counts, with the limits of the collection.
    """
    if not needs:
        return config
    collections = dict(config.chosen)
    for need in needs:
        for name in need.collections:
            if name in BUILT_IN and name not in collections:
                collections[name] = Collection(ADAPTIVE)
    probes = dict.fromkeys([*config.probes, *(probe for need in needs for probe in need.probes)])
    return replace(config, collections=with_tensors(collections, needs), probes=tuple(probes))


def with_tensors(
    collections: Mapping[str, Collection], needs: Sequence[CaptureNeed]
) -> dict[str, Collection]:
    """Return configured collections with the full tensors that rules need: in the modes of both, at the more frequent cadence."""
    changed = dict(collections)
    for need in needs:
        for name in need.collections if need.every else ():
            if name in changed and name not in FIGURES_ONLY:
                changed[name] = replace(changed[name], tensors=_combined(changed[name].tensors, need))
    return changed


def _combined(own: Cadence | None, need: CaptureNeed) -> Cadence:
    own_modes = need.modes if own is None else own.modes
    in_all = not own_modes or not need.modes
    modes = () if in_all else tuple(mode for mode in MODES if mode in own_modes or mode in need.modes)
    if own is None:
        return Cadence(need.every, modes=modes)
    if own.every is None or own.every > need.every:
        return Cadence(need.every, steps=own.steps, modes=modes)
    return replace(own, modes=modes)


def not_provided(config: CaptureConfig, needs: Sequence[CaptureNeed]) -> str:
    """Return what a recording cannot provide of the needs, and for which rules; empty if it provides all."""
    problems: list[str] = []
    for need in needs:
        missing = [name for name in need.collections if name not in config.chosen]
        if missing and len(missing) == len(need.collections):
            problems.append(f"rule {need.rule}: {', '.join(missing)} not recorded")
        elif need.every and all(name in FIGURES_ONLY or name in missing for name in need.collections):
            problems.append(f"rule {need.rule}: no full tensors of {', '.join(need.collections)}")
        if probes := [probe for probe in need.probes if probe not in config.probes]:
            problems.append(
                f"rule {need.rule}: {', '.join(probes)} not measured; restart the run with the rule"
            )
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"and {len(problems) - _MAX_PROBLEMS} more"]
    return "; ".join(problems)
