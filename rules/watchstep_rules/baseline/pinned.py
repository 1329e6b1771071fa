"""The baseline that was pinned to an attempt: as an object on the store, and in the parameters of the rule.

The service creates the object before it judges the first rows of an attempt, and never changes it. A backtest reads the same
object, so that it judges the attempt as it was judged live.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.format.layout import baseline_document
from watchstep.store.store import Store
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.ranges.baseline import Baseline

MAX_BYTES = 4 * 1024 * 1024
_MAX_MEMORY = 64 * 1024 * 1024


def read_baseline(run_store: Store, attempt: str) -> str | None:
    """The JSON text of an attempt's baseline; None where none was pinned.

    Raises:
        FormatError: the object is not a baseline.
        StoreError: the store cannot be read.
    """
    key = baseline_document(attempt)
    try:
        data = run_store.get(key, limit=MAX_BYTES)
    except NotFoundError:
        return None
    try:
        return Baseline.model_validate(parse_json(data, _MAX_MEMORY)).model_dump_json()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{key}: not a baseline ({type(error).__name__})", "remove the object") from error


def with_baseline(config: RuleConfig, baseline: str | None) -> RuleConfig:
    """A rule config with the baseline of an attempt; itself where it has one of its own, or is of another rule.

    Args:
        config: the rule config.
        baseline: as JSON text, checked before; None where the attempt has none.
    """
    if baseline is None or config.rule != UnlikeEarlierRuns.name or "baseline" in config.params:
        return config
    return _with_baseline(config.model_dump_json(by_alias=True), baseline)


def configs_of_attempt(
    configs: Sequence[RuleConfig], run_store: Store, attempt: str
) -> tuple[list[RuleConfig], str]:
    """The rule configs as they judge an attempt.

    Returns:
        The configs, and what is wrong with the attempt's baseline; empty where nothing is.

    Raises:
        StoreError: the store cannot be read.
    """
    if not any(config.rule == UnlikeEarlierRuns.name for config in configs):
        return list(configs), ""
    try:
        baseline = read_baseline(run_store, attempt)
    except FormatError as error:
        return list(configs), error.what
    return [with_baseline(config, baseline) for config in configs], ""


@functools.lru_cache(maxsize=64)
def _with_baseline(config: str, baseline: str) -> RuleConfig:
    plain = RuleConfig.model_validate_json(config)
    params = {**plain.params, "baseline": Baseline.model_validate_json(baseline).model_dump(mode="json")}
    return plain.model_copy(update={"params": params})
