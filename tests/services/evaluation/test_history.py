from __future__ import annotations

from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.engine.rule_inputs import History, Lookback
from watchstep_services.service.caches import HistoryCache

REACH = Lookback.of(DEFAULT_RULES)


def test_the_cache_holds_for_one_cursor_and_forgets_the_oldest() -> None:
    cache = HistoryCache(rows=2)
    for run in (1, 2, 3):
        cache.put((run, "a1"), "{}", REACH, History.empty())
    assert cache.get((1, "a1"), "{}", REACH) is None
    assert cache.get((3, "a1"), "{}", REACH) is not None
    assert cache.get((3, "a1"), '{"a1/node/w0":1}', REACH) is None
    assert cache.get((3, "a1"), "{}", Lookback()) is None
