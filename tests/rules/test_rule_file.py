from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from watchstep.errors import RuleError
from watchstep_rules.rule_file import check, load, load_as_data, parse

GOOD = """
rules:
  - rule: vanishing_gradient
    params: {threshold: 1.0e-8}
    tensors: {exclude: "embed.*"}
    for: {steps: 3}
    severity: critical
    actions: [stop]
  - rule: vanishing_gradient
    name: slow
"""


def test_a_rule_file_is_a_list_of_configs(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(GOOD, encoding="utf-8")
    first, second = load(path)
    assert (first.name, first.hold.steps, first.stops) == ("vanishing_gradient", 3, True)
    assert second.name == "slow"
    assert load_as_data(path) == [first.as_data(), second.as_data()]
    assert check({"rules": load_as_data(path)}, "again") == (first, second)


def test_the_sdk_finds_the_reader_by_entry_point() -> None:
    (entry,) = entry_points(group="watchstep.rule_files")
    assert entry.load() is load_as_data


@pytest.mark.parametrize("text", ["", "# nothing", "rules: []"])
def test_an_empty_file_has_no_rules(text: str) -> None:
    assert parse(text, "rules.yaml") == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("rules: [", "not valid YAML (line 1, column 9: "),
        ("a: b: c", "not valid YAML (line 1, column 5: "),
        ("rules: !!python/object:os.system {}", "not valid YAML (line 1, column 8: "),
        ("\x07", "not valid YAML"),
        ("- rule: nan_or_inf", "no mapping"),
        ("just text", "no mapping"),
        ("rule: nan_or_inf", "rules: Field required (and 1 more)"),
        ("rules: nan_or_inf", "rules: Input should be a valid tuple"),
        ("rules: [nan_or_inf]", "rules.0: "),
        ("rules: [{rule: nan}]", "rules.0: unknown rule 'nan'; use one of: "),
        (
            "rules: [{rule: nan_or_inf}, {rule: nan_or_inf}]",
            "rules: two rule configs are named 'nan_or_inf': give one of them",
        ),
        ("rules: [{rule: nan_or_inf, for: {steps: 0}}]", "rules.0.for.steps: "),
        ("rules: [{rule: nan_or_inf, params: {max_elements: -1}}]", "rules.0.params.max_elements: "),
        (
            "rules: [{rule: nan_or_inf, params: {elements: 1}}]",
            "rules.0.params.elements: Extra inputs are not permitted",
        ),
        ("rules: [{rule: nan_or_inf, actions: [explode]}]", "rules.0.actions.0"),
    ],
)
def test_a_wrong_file_names_the_place_and_the_mend(text: str, place: str) -> None:
    with pytest.raises(RuleError, match=r"^rule file my/rules.yaml: " + re.escape(place)) as caught:
        parse(text, "my/rules.yaml")
    assert caught.value.mend


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match=r"nothing.yaml: cannot be read .*No such file.*\n  mend: check the path"
    ):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(RuleError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("rules: [] # ü".encode("latin-1"))
    with pytest.raises(RuleError, match="cannot be read"):
        load(tmp_path / "latin.yaml")
