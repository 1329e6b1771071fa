"""The page of symptoms names rules that there are, and all of them."""

from __future__ import annotations

import re

from docs.tables import FOLDER
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES

PAGE = (FOLDER / "symptoms.md").read_text(encoding="utf-8")
CELLS = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
BOLD = {name for cell in CELLS for name in re.findall(r"\*\*`(\w+)`\*\*", cell)}
NAMED = {name for cell in CELLS for name in re.findall(r"`(\w+)`", cell)}


def test_every_rule_has_a_symptom() -> None:
    own = {name for name in RULES if not name.startswith("sagemaker_")}
    assert own == NAMED


def test_bold_rules_are_the_default_rules() -> None:
    assert {config.rule for config in DEFAULT_RULES} == BOLD
