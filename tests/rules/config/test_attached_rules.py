"""Rules that are attached to a job in Python."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import watchstep_rules
from watchstep.errors import RuleError
from watchstep_rules import AttachedRule, nan_or_inf, vanishing_gradient
from watchstep_rules.config import by_name
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.registry import RULES


def test_every_built_in_rule_can_be_attached_with_its_parameters() -> None:
    assert set(by_name.__all__) == set(RULES)
    for name, rule in RULES.items():
        attach = getattr(watchstep_rules, name)
        if not any(field.is_required() for field in rule.params_type.model_fields.values()):
            severity = next((config.severity for config in DEFAULT_RULES if config.rule == name), "warning")
            assert attach().config == RuleConfig(rule=name, severity=severity)
        with pytest.raises(RuleError, match="no_such_parameter"):
            attach(no_such_parameter=1)


def test_a_rule_is_written_as_it_would_be_in_a_file() -> None:
    attached = (
        vanishing_gradient(threshold=1e-7)
        .on("gradients", exclude="embed.*")
        .lasting(steps=3)
        .severe("critical")
        .named("dying")
        .labelled(team="vision")
        .labelled(tier="1")
        .stop()
        .stop()
        .notify("ml-oncall")
        .webhook("http://hooks.test/x")
        .snapshot()
        .inhibiting("dead_relu")
        .with_message("{tensor} is dying")
        .dry_run()
    )
    assert attached.config == RuleConfig.model_validate(
        {
            "rule": "vanishing_gradient",
            "name": "dying",
            "params": {"threshold": 1e-7},
            "tensors": {"collection": "gradients", "exclude": "embed.*"},
            "for": {"steps": 3},
            "severity": "critical",
            "labels": {"team": "vision", "tier": "1"},
            "message": "{tensor} is dying",
            "actions": ["stop", {"notify": "ml-oncall"}, {"webhook": "http://hooks.test/x"}, "snapshot"],
            "inhibits": ["dead_relu"],
            "dry_run": True,
        }
    )


def test_each_step_of_writing_leaves_the_one_before_it_alone() -> None:
    plain = nan_or_inf()
    assert plain.stop().config.stops
    assert plain == nan_or_inf()
    assert isinstance(plain, AttachedRule)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: vanishing_gradient(threshold="much"), "vanishing_gradient, threshold"),
        (lambda: nan_or_inf().notify("no such/receiver"), "nan_or_inf, actions"),
        (lambda: nan_or_inf().on(include="("), "nan_or_inf, tensors"),
        (lambda: nan_or_inf().with_message("{no_such_field}"), "nan_or_inf, message"),
        (lambda: nan_or_inf().lasting(steps=0), "nan_or_inf, for"),
        (
            lambda: nan_or_inf().stop().severe("info"),
            "severity info with stop: .* use severity warning or critical",
        ),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(RuleError, match=message):
        wrong()


def test_editors_see_the_parameters_and_modules_stay_importable() -> None:
    program = (
        "from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf\n"
        "from watchstep_rules import nan_or_inf\n"
        "import watchstep_rules.builtin.activations.dead_relu\n"
        "assert NanOrInf.name == 'nan_or_inf' and callable(nan_or_inf) and callable(watchstep_rules.dead_relu)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert inspect.signature(RULES["vanishing_gradient"].params_type).parameters.keys() >= {"threshold"}
