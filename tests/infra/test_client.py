"""The report of `make client` about a generated client. A program replaces openapi-python-client, which has a separate environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infra import client

STAND_IN = """
import pathlib, sys
arguments = sys.argv[1:]
assert "--fail-on-warning" in arguments
if {warns}:
    print("Warning(s) encountered while generating")
    sys.exit(1)
package = pathlib.Path(arguments[arguments.index("--output-path") + 1])
(package / "api" / "runs").mkdir(parents=True)
for name in {modules}:
    (package / name).write_text({text!r})
"""
PACKAGES = ["__init__.py", "api/__init__.py", "api/runs/__init__.py"]
BOTH = [*PACKAGES, "api/runs/list_runs.py", "api/runs/get_run.py"]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    operations = {"/runs": {"get": {}, "parameters": []}, "/runs/{run}": {"get": {}}}
    path.write_text(json.dumps({"paths": operations}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("modules", "text", "warns", "fault"),
    [
        (BOTH, "", False, ""),
        (BOTH, "", True, "Warning(s) encountered"),
        (BOTH[:-1], "", False, "the client has 1 operations, the document 2"),
        (BOTH, "import nothing_like_it", False, "No module named 'nothing_like_it'"),
    ],
    ids=("complete", "warning", "operation-left-out", "import-fails"),
)
def test_client_is_complete_or_the_check_fails(
    tmp_path: Path, document: Path, modules: list[str], text: str, warns: bool, fault: str
) -> None:
    program = tmp_path / "generator.py"
    program.write_text(STAND_IN.format(modules=modules, text=text, warns=warns), encoding="utf-8")
    found = client.faults(document, tmp_path / "client", [sys.executable, str(program)])
    assert bool(found) == bool(fault)
    assert not fault or fault in found[0]


def test_the_documents_operations_are_counted() -> None:
    assert client.documented(client.DOCUMENT) > 80
