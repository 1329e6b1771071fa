"""The reference: public names, sources of defaults, and symptoms."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import nbformat
import pytest

from docs.default_sources import SOURCES
from docs.tables import FOLDER
from tests.docs.test_docs import ROOT
from tests.processes import run_python
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES

# Public names


DEEPER = frozenset(
    {
        # One module for each framework, so that no other framework is imported.
        "watchstep.integrations.accelerate",
        "watchstep.integrations.lightning",
        "watchstep.integrations.optuna",
        "watchstep.integrations.ray_tune",
        "watchstep.integrations.transformers",
        # The module has the name of its function, so the package cannot export the function.
        "watchstep.reading.comparison.diff",
        # A service inside a program, as the examples start it.
        "watchstep_services.core.settings",
        "watchstep_services.serve.embedded",
    }
)
"""Modules below the second level that examples may import from."""

PACKAGES = (
    "watchstep",
    "watchstep.client",
    "watchstep.reading",
    "watchstep.report",
    "watchstep.trace",
    "watchstep_launch",
    "watchstep_rules",
)
REFERENCE = ROOT / "docs" / "reference" / "python"
_IMPORT = re.compile(
    r"^[ \t]*(?:from (watchstep[\w.]*) import |import (watchstep[\w.]*)(?:$| as ))", re.MULTILINE
)


def text_of(path: Path) -> str:
    """The text of a page or a program, or the code of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def imported() -> dict[str, set[str]]:
    """Module → the files that import from it."""
    modules: dict[str, set[str]] = {}
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(path for path in (ROOT / "examples").iterdir() if path.suffix in {".md", ".py", ".ipynb"}),
    ]:
        for names in _IMPORT.findall(text_of(path)):
            modules.setdefault("".join(names), set()).add(str(path.relative_to(ROOT)))
    return modules


def test_examples_import_from_public_modules() -> None:
    modules = imported()
    deep = {name for name in modules if name.count(".") > 1}
    assert {name: modules[name] for name in deep - DEEPER} == {}
    assert deep == DEEPER, "remove from DEEPER what no example imports"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == sorted(
        module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_in_the_reference(package: str) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    rendered = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    module = importlib.import_module(package)
    missing = [
        name
        for name in module.__all__
        if not any(entry.endswith(f".{name}") for entry in rendered)
        and getattr(getattr(module, name), "__module__", "") not in rendered
        and f"`{name}`" not in text
    ]
    assert missing == []


def test_the_names_of_a_package_are_loaded_when_they_are_used() -> None:
    program = (
        "import sys, watchstep, watchstep.reading, watchstep_launch\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'pydantic', 'obstore', 'urllib3'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = run_python("-c", program)
    assert output == "[]\n"


# Sources of defaults


def test_every_source_is_of_a_parameter() -> None:
    known = {name: set(RULES[name].params_type.model_fields) for name in SOURCES}
    assert {
        name: set(sources) - known[name] for name, sources in SOURCES.items() if set(sources) - known[name]
    } == {}


def test_every_default_of_a_rule_that_has_sources_has_one() -> None:
    for config in DEFAULT_RULES:
        if config.rule in SOURCES:
            assert set(SOURCES[config.rule]) == set(type(config.parameters).model_fields), config.rule


def test_every_default_rule_names_what_it_cannot_distinguish() -> None:
    assert [config.rule for config in DEFAULT_RULES if not RULES[config.rule].cannot_distinguish] == []


def test_what_was_measured_is_of_rules_that_there_are() -> None:
    measured = json.loads((FOLDER / "margins.json").read_text(encoding="utf-8"))
    assert {name.partition("/")[0] for name in measured["configs"]} <= set(RULES)


# Symptoms


PAGE = (FOLDER / "symptoms.md").read_text(encoding="utf-8")
CELLS = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
BOLD = {name for cell in CELLS for name in re.findall(r"\*\*`(\w+)`\*\*", cell)}
NAMED = {name for cell in CELLS for name in re.findall(r"`(\w+)`", cell)}


def test_every_rule_has_a_symptom() -> None:
    own = {name for name in RULES if not name.startswith("sagemaker_")}
    assert own == NAMED


def test_bold_rules_are_the_default_rules() -> None:
    assert {config.rule for config in DEFAULT_RULES} == BOLD
