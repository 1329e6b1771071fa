"""The limit of series that one alert follows."""

from __future__ import annotations

from tests.sdk.format.blocks import Row, block_of, gradient
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase
from watchstep_rules.engine.judge import RuleMemory, judge
from watchstep_rules.engine.rule_inputs import JudgingProgress
from watchstep_rules.engine.series_limit import MOST_SERIES, limited

NAN = float("nan")
LAYERS = 100
WORKERS = MOST_SERIES // LAYERS + 50
CONFIG = RuleConfig.model_validate({"rule": "nan_or_inf"})


def all_workers(step: int, value: float) -> Block:
    """One row of each layer on each worker."""
    infos = [gradient(f"layer{index:03d}", order=index) for index in range(LAYERS)]
    return block_of([Row(step, info, [value], worker=worker) for worker in range(WORKERS) for info in infos])


def test_an_alert_about_more_series_than_the_limit_fires_for_the_first_cause_and_resolves() -> None:
    bad = all_workers(3, NAN)
    verdict = judge(CONFIG, RuleMemory(), Block.empty(), bad, JudgingProgress(-1, 3, 0))
    assert len(verdict.findings) == LAYERS * WORKERS
    assert [change.phase for change in verdict.transitions] == [Phase.FIRING]
    finding = verdict.transitions[-1].finding
    assert finding is not None
    assert (finding.step, finding.worker) == (3, 0)
    state = verdict.memory.model_dump_json()
    assert len(state) < 400 * MOST_SERIES

    healthy = all_workers(4, 1.0)
    after = judge(CONFIG, verdict.memory, bad, healthy, JudgingProgress(3, 4, 0))
    assert [change.phase for change in after.transitions] == [Phase.RESOLVED]


def test_followed_series_keep_their_findings() -> None:
    bad = block_of([Row(3, gradient(f"layer{index}", order=index), [NAN]) for index in range(10)])
    findings = judge(CONFIG, RuleMemory(), Block.empty(), bad, JudgingProgress(-1, 3, 0)).findings
    followed = {"layer9.weight:gradient@0/train", "other.weight:gradient@0/train"}
    chosen = limited(findings, followed, most=4)
    assert [finding.tensor for finding in chosen] == [
        "layer0.weight:gradient",
        "layer1.weight:gradient",
        "layer9.weight:gradient",
    ]
    assert limited(findings, followed, most=12) is findings
