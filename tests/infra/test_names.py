"""A class name has one meaning in the whole product, and retired words are not in public names."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from watchstep_services.core.telemetry.metrics import REGISTRY
from watchstep_services.db.models import Base

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "sdk/watchstep",
    "rules/watchstep_rules",
    "launch/watchstep_launch",
    "services/watchstep_services",
)
SAME_ON_PURPOSE = {"WatchstepCallback"}
"""Callbacks of frameworks, which are named as their frameworks' own are."""


@cache
def sources() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


# Parsing all modules takes ten seconds, of which nothing else is needed.
_CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
_DEFINITION = re.compile(r"^ *(?:class|(?:async )?def) (\w+)", re.MULTILINE)


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path, text in sources():
        for name in _CLASS.findall(text):
            places[name].append(path)
    assert {
        name: found for name, found in places.items() if len(found) > 1 and name not in SAME_ON_PURPOSE
    } == {}


RETIRED = frozenset(
    [
        "anew",
        "as_told",
        "ask",
        "asked",
        "asks",
        "beside",
        "common_stop",
        "direct",
        "four_digits",
        "hear",
        "heard",
        "hears",
        "heed",
        "heeded",
        "keeper",
        "keeping",
        "lest",
        "let_go",
        "letter",
        "looks",
        "mend",
        "mended",
        "mends",
        "obey",
        "obeyed",
        "obeying",
        "obeys",
        "of_catalogue",
        "part_object",
        "patience",
        "prepared",
        "quiet_commit",
        "reach",
        "remembered",
        "said",
        "say",
        "saying",
        "says",
        "sealed",
        "seals",
        "seal_seconds",
        "sight",
        "stop_talk",
        "tally",
        "tell",
        "teller",
        "telling",
        "tells",
        "told",
        "trail",
        "trails",
        "tried",
        "unheld",
        "whom",
        "whose",
        "wish",
    ]
)
"""Words that the glossary replaces, and verbs of speech for what software does; see CONTRIBUTING.md."""


def tokens(name: str) -> str:
    """A name's words in lower case, each between underscores: ``_alert_state_machine_``."""
    return (
        "_"
        + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").strip("_").lower()
        + "_"
    )


def retired(names: Iterable[str]) -> list[str]:
    """Names with retired words."""
    return sorted(f"{name}: {word}" for name in set(names) for word in RETIRED if f"_{word}_" in tokens(name))


def test_retired_words_are_in_no_class_or_function() -> None:
    assert not retired(
        name for path, text in sources() if "migrations" not in path for name in _DEFINITION.findall(text)
    )


def test_retired_words_are_in_no_module() -> None:
    assert not retired(Path(path).stem for path, _ in sources() if "migrations" not in path)


@pytest.mark.parametrize("page", ["commands.md", "settings.md"])
def test_retired_words_are_in_no_command_option_or_setting(page: str) -> None:
    """Both pages are generated from the code."""
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert not retired(re.findall(r"--[a-z][a-z-]+|WATCHSTEP_[A-Z_]+|`watchstep [a-z -]+", text))


def test_retired_words_are_in_no_table_or_column() -> None:
    tables = Base.metadata.tables.values()
    assert not retired(
        [table.name for table in tables] + [column.name for table in tables for column in table.columns]
    )


def test_retired_words_are_in_no_metric() -> None:
    assert not retired(metric.name for metric in REGISTRY.collect() if metric.name.startswith("watchstep"))


def test_retired_words_are_in_nothing_of_the_http_api() -> None:
    document = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
    schemas = document["components"]["schemas"]
    names = [*schemas, *(name for schema in schemas.values() for name in schema.get("properties", {}))]
    for address, operations in document["paths"].items():
        names += [part for part in address.split("/") if not part.startswith("{")]
        for operation in operations.values():
            names += [
                operation["operationId"],
                *(parameter["name"] for parameter in operation.get("parameters", ())),
            ]
    assert not retired(names)


EMBEDDED = re.compile(r"^\s*from (watchstep[\w.]*) import (\([^)]*\)|[^\n(#]+)", re.MULTILINE)


@cache
def defined(module: str) -> set[str] | None:
    """The names that a module binds, with its submodules; None where there is no such module, and everything where names are lazy."""
    for package in PACKAGES:
        top = Path(package)
        if module.split(".", maxsplit=1)[0] != top.name:
            continue
        path = ROOT / top.parent / module.replace(".", "/")
        source = path.with_suffix(".py")
        if not source.exists():
            source = path / "__init__.py"
        if not source.exists():
            return None
        names = {child.stem for child in path.iterdir()} if path.is_dir() else set()
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # names of a lazy package
        return names
    return None


@pytest.mark.ci
def test_embedded_programs_import_what_exists() -> None:
    """Programs in strings, pages and notebooks are seen by no type checker."""
    missing = []
    # Packages of others and environments lie in build/ and in web/.
    folders = [ROOT / ".ci", *(each for each in ROOT.glob("[!.]*/") if each.name not in {"build", "web"})]
    paths = [ROOT / "Makefile", *ROOT.glob("*.md"), *(path for each in folders for path in each.rglob("*"))]
    for path in sorted(path for path in paths if path.is_file()):
        if path.suffix in {".py", ".md", ".ipynb", ""} or path.is_relative_to(ROOT / "infra"):
            # Programs of infra/ that tests import leave bytecode beside them.
            if path.name == "CHANGELOG.md" or path == Path(__file__) or "__pycache__" in path.parts:
                continue
            text = path.read_text(encoding="utf-8").replace("\\n", "\n")
            for found in EMBEDDED.finditer(text):
                if found[1] == "watchstep_rules":
                    continue  # its names are those of the rules, created on access
                names = [part.split(" as ")[0].strip(" ()\"',\\") for part in found[2].split(",")]
                bound = defined(found[1])
                missing += [
                    f"{path.relative_to(ROOT)}: from {found[1]} import {name}"
                    for name in names
                    if name.isidentifier() and (bound is None or name not in bound)
                ]
    assert not missing, "\n".join(missing)
