"""The default rules on recordings of each framework: what they judge, and which fire at which step for planted faults."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from docs.framework_support import FRAMEWORKS, OWN_INPUTS, FrameworkSupport
from tests.frameworks.judged_programs import FAULT, JUMP, PROGRAMS, SAVED_EVERY, STEPS, has_layers
from tests.processes import environment_of, run_python
from watchstep import Run, open_run
from watchstep_rules.backtest.backtest import ReplayOutcome, backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.engine.judge import RuleHealth

pytest.importorskip("keras", reason="THE FRAMEWORKS ARE NOT INSTALLED: rules on their records are not proven")

SCRIPT = Path(__file__).with_name("judged_programs.py")
NAMES = {
    "pytorch": "PyTorch",
    "jax": "JAX",
    "keras-tensorflow": "Keras 3",
    "keras-jax": "Keras 3",
    "keras-torch": "Keras 3",
    "tensorflow": "TensorFlow 2",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
}
MODULES = {"pytorch": "torch", "keras-tensorflow": "tensorflow", "keras-jax": "jax", "keras-torch": "torch"}
INSTALLED = [name for name in PROGRAMS if importlib.util.find_spec(MODULES.get(name, name))]
WITH_LAYERS = [name for name in INSTALLED if has_layers(name)]
BOOSTED = [name for name in INSTALLED if not has_layers(name)]


def support_of(framework: str) -> FrameworkSupport:
    return next(support for support in FRAMEWORKS if support.name == NAMES[framework])


class Trained:
    """The recorded trainings of each framework, and what the default rules report of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - one object for the module
    def results(self, framework: str) -> dict[str, Any]:
        results = self._folder / f"{framework}.json"
        run_python(SCRIPT, framework, self._folder / framework, results, env=environment_of(self._folder))
        found: dict[str, Any] = json.loads(results.read_text())
        return found

    def run(self, framework: str, kind: str) -> Run:
        assert self.results(framework)[kind]["faults"] == {}
        return open_run(self._folder / framework / "default" / kind)

    @cache  # noqa: B019 - as above
    def outcomes(self, framework: str, kind: str) -> list[ReplayOutcome]:
        outcomes = backtest(self.run(framework, kind).rows(), DEFAULT_RULES)
        assert [outcome.problem for outcome in outcomes if outcome.problem] == []
        return outcomes

    def fired(self, framework: str, kind: str) -> dict[str, int]:
        """The first step of each rule that fired."""
        return {
            outcome.config.rule: outcome.fired[0].step
            for outcome in self.outcomes(framework, kind)
            if outcome.fired
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("judged"))


def roles_of(run: Run) -> dict[str, set[str]]:
    """The roles of each collection's tensors."""
    roles: dict[str, set[str]] = {}
    for info in run.catalogue:
        for name in info.collections:
            roles.setdefault(name, set()).add(info.role)
    return roles


@pytest.mark.release
@pytest.mark.parametrize("framework", INSTALLED)
def test_a_framework_records_the_collections_of_the_table(trained: Trained, framework: str) -> None:
    support = support_of(framework)
    declared: dict[str, set[str]] = {}
    for collections in (support.collections, support.on_data):
        for name, roles in collections.items():
            declared.setdefault(name, set()).update(roles)
    recorded = roles_of(trained.run(framework, "healthy"))
    if framework == "pytorch":  # the program has no batch normalization, replicas, labels, …
        assert all(roles <= declared[name] for name, roles in recorded.items())
    else:
        assert recorded == declared


@pytest.mark.parametrize("framework", INSTALLED)
def test_default_rules_have_data_where_the_table_says_so(trained: Trained, framework: str) -> None:
    support = support_of(framework)
    for outcome in trained.outcomes(framework, "healthy"):
        has_data = outcome.health is RuleHealth.OK
        is_declared = support.judges(outcome.config) in {"yes", "with data"}
        if framework == "pytorch":
            assert is_declared
        elif outcome.config.rule == "resume_mismatch":
            assert outcome.health is RuleHealth.NO_DATA  # the first attempt continues none
        elif outcome.config.rule in OWN_INPUTS:
            assert has_data or not is_declared
        else:
            assert has_data == is_declared, outcome.config.rule


@pytest.mark.parametrize("framework", INSTALLED)
def test_nothing_fires_on_a_healthy_training(trained: Trained, framework: str) -> None:
    assert trained.fired(framework, "healthy") == {}
    steps = trained.run(framework, "healthy").steps("train")
    assert steps == list(range(STEPS if has_layers(framework) else len(steps)))


@pytest.mark.parametrize("framework", WITH_LAYERS)
def test_faults_of_networks_are_reported_at_their_steps(trained: Trained, framework: str) -> None:
    assert trained.fired(framework, "nan") == {"nan_or_inf": FAULT, "non_finite_values": FAULT + 1}
    exploding = trained.fired(framework, "exploding")
    assert exploding["exploding_gradient"] == FAULT + 1
    assert all(step > FAULT for step in exploding.values())
    assert trained.fired(framework, "vanishing") == {"vanishing_gradient": 2}
    dead = trained.fired(framework, "dead")
    assert ("dead_relu" in dead) == (framework == "pytorch")
    assert dead["vanishing_gradient"] == 2


@pytest.mark.parametrize("framework", WITH_LAYERS)
def test_a_finding_names_the_layer(trained: Trained, framework: str) -> None:
    (outcome,) = (
        outcome
        for outcome in trained.outcomes(framework, "vanishing")
        if outcome.config.rule == "vanishing_gradient"
    )
    run = trained.run(framework, "vanishing")
    kernels = sorted((info for info in run.catalogue if info.role == "weight"), key=lambda info: info.order)
    assert len(kernels) == 6
    assert f"{kernels[0].name}:gradient" in {finding.tensor for finding in outcome.findings}
    assert f"{kernels[-1].name}:gradient" not in {finding.tensor for finding in outcome.findings}


@pytest.mark.parametrize("framework", WITH_LAYERS)
def test_the_gate_policy_and_a_guard_stop_at_the_step_of_a_nan(trained: Trained, framework: str) -> None:
    results = trained.results(framework)
    for kind in ("gate", "guard"):
        assert results[kind] == {"faults": {}, "stopped": FAULT}
        assert trained.run(framework, kind).steps("train")[-1] == FAULT


@pytest.mark.parametrize("framework", BOOSTED)
def test_faults_of_boosting_are_reported_after_their_rounds(trained: Trained, framework: str) -> None:
    assert trained.fired(framework, "nan") == {"non_finite_values": JUMP + 1}
    jump = trained.fired(framework, "rate")
    assert list(jump) == ["hyperparameter_jump"]
    assert JUMP < jump["hyperparameter_jump"] <= JUMP + 10


def saved_roles(run: Run) -> dict[str, list[int]]:
    """The steps at which full tensors were saved, by role."""
    roles: dict[str, list[int]] = {}
    for info in run.catalogue:
        if steps := run.tensor(info.name).saved_steps("train"):
            roles[info.role] = steps
    return roles


def steps_of(saved: dict[str, list[int]], roles: Iterable[str]) -> list[list[int]]:
    return [saved.get(role, []) for role in roles]


@pytest.mark.parametrize("framework", INSTALLED)
def test_full_tensors_are_saved_as_the_table_says(trained: Trained, framework: str) -> None:
    saved = saved_roles(trained.run(framework, "healthy"))
    if has_layers(framework):
        first, second = steps_of(saved, ["gradient"])[0][:2]
        assert (first, second) == (0, SAVED_EVERY)
        assert steps_of(saved, ["weight", "bias"])[0][-1] == SAVED_EVERY
        assert ("output" in saved) == (framework == "pytorch")
    else:
        assert saved["output"][0] == 0
