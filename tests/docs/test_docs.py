"""The docs cannot drift: their tables follow from the code, and their examples run."""

from __future__ import annotations

import base64
import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml

import watchstep
from docs import tables
from tests.warmed import warmed
from watchstep.capture.document import document as capture_document
from watchstep_rules.rule_files import rule_file
from watchstep_rules.rule_files.rule_file import schema_text
from watchstep_rules.testing import file as rule_tests
from watchstep_services.channels import receiver_file
from watchstep_services.channels.webhook import signing_key, webhook_headers
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.role import attempt_policy

ROOT = Path(tables.FOLDER).parent
DECISIONS = ROOT / "docs" / "decisions"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if DECISIONS not in page.parents)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_tables_are_as_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "write them anew: python -m docs.tables"


def test_the_schemas_are_as_the_code_says() -> None:
    for path, text in (
        (tables.SCHEMA, schema_text()),
        (tables.CAPTURE_SCHEMA, capture_document.schema_text()),
        (tables.TESTS_SCHEMA, rule_tests.schema_text()),
        (tables.OPENAPI, tables.openapi_text()),
    ):
        assert path.read_text(encoding="utf-8") == text, "write it anew: python -m docs.tables"


def test_the_schema_of_receivers_is_as_the_code_says() -> None:
    assert tables.RECEIVERS.read_text(encoding="utf-8") == receiver_file.schema_text(), (
        "python -m docs.tables"
    )


RELEASE = {"clusters.md", "integrations.md", "replay.md"}
"""Pages whose programs are those of estimator.md, or need several imports of frameworks or of PyTorch, which have tests of their own."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.name,
            marks=pytest.mark.release if page.name in RELEASE else pytest.mark.ci,
        )
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    text = "\n".join(blocks(page, "python"))
    program.write_text(text, encoding="utf-8")
    modules = ["watchstep_services.serve.embedded"] if "watchstep_services" in text else []
    warmed().run(program, folder=tmp_path, modules=modules, warnings="error")


@pytest.mark.ci
def test_the_readmes_example_is_the_file_and_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"<!-- example: (\S+) -->", readme)
    example = (ROOT / name).read_text(encoding="utf-8")
    (block,) = blocks(ROOT / "README.md", "python")
    assert example.partition('"""\n\n')[2] == block
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    output = warmed().run(program, folder=tmp_path, warnings="error")
    assert "step: int64" in output


@pytest.mark.parametrize("text", [t for page in PAGES for t in blocks(page, "yaml")])
def test_rule_files_are_valid(text: str) -> None:
    if "receivers" in yaml.safe_load(text):
        assert isinstance(receiver_file.check(text), receiver_file.ReceiverFile)
        return
    if "profiles" in yaml.safe_load(text):
        return  # of the command line: tests/services/cli/test_profiles.py reads such a file
    if {"collections", "bundles"} & set(yaml.safe_load(text)):
        assert capture_document.config_of(yaml.safe_load(text), "docs")
        return
    assert yaml.safe_load(text)["rules"]
    assert rule_file.parse(text, "docs")


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "infra" / "README.md",
        ROOT / "infra" / "helm" / "watchstep" / "README.md",
        *PAGES,
        *DECISIONS.glob("*.md"),
    ],
    ids=lambda page: page.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_variable_of_the_recorder_is_documented() -> None:
    held = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    for source in (ROOT / "sdk").rglob("*.py"):
        for name in re.findall(r'"(WATCHSTEP_[A-Z_]+)"', source.read_text(encoding="utf-8")):
            assert f"`{name}`" in held, f"{name} of {source.name}"


def test_the_example_of_a_webhook_accepts_what_the_service_sends() -> None:
    (block,) = blocks(ROOT / "docs" / "service" / "receivers.md", "python")
    names: dict[str, Any] = {}
    exec(block, names)
    accept = names["accept"]
    secret, other = (f"whsec_{base64.b64encode(secrets.token_bytes(24)).decode()}" for _ in range(2))
    body, seen, now = b'{"specversion": "1.0"}', set[str](), 1_800_000_000
    headers = webhook_headers("n-1", now * 10**9, body, [signing_key(secret)])
    assert not accept([other], headers, body, now + 10, seen)
    assert not accept([secret], headers, body + b" ", now + 10, seen)
    assert not accept([secret], headers, body, now + 300, seen)
    assert accept([other, secret], headers, body, now + 10, seen)
    assert not accept([secret], headers, body, now + 10, seen)


def test_the_session_policy_is_the_one_that_the_service_sends() -> None:
    page = (ROOT / "docs" / "service" / "tenancy.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- session policy -->\n```json\n(.*?)```", page, re.DOTALL)
    role = StoreRegistration(
        "s3://acme-training/runs", "arn:aws:iam::123456789012:role/watchstep", "acme-7f3a"
    )
    policy = json.loads(attempt_policy(StorePlace(1, 1, role, "", "vision"), "run-1", "a1"))
    assert json.loads(shown) == policy["Statement"][0]


def test_the_version_is_the_packages() -> None:
    version = watchstep.__version__
    readme, changelog = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md"))
    assert re.findall(r"^Version (\d+\.\d+\.\d+)", readme, re.MULTILINE) == [version]
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[0] == version
    chart = yaml.safe_load((ROOT / "infra/helm/watchstep/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    images = re.findall(r"image: watchstep(?:-\w+)?:(\S+)$", compose, re.MULTILINE)
    assert images == [version] * 2
