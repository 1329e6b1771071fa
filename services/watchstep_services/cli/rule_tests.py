"""``watchstep rules test``: runs rule tests, which define series and the expected alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from watchstep.errors import ConfigError
from watchstep_rules.testing import file
from watchstep_rules.testing.running import TestResult, junit_xml, lines, run_file, summary
from watchstep_services.cli.connection import JsonOption
from watchstep_services.core.console import echo, echo_own, show_json


def run_tests(
    files: Annotated[list[Path] | None, typer.Argument(help="Rule test files.")] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write the results to this file as JUnit XML.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of rule test files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run rule tests: series or recorded runs, and the expected alerts. Exit code 1 if a test fails.

    Examples:
        watchstep rules test tests/*.yaml
        watchstep rules test tests/loss.yaml --junit results.xml
        watchstep rules test tests/*.yaml --json
    """
    if schema:
        echo_own(file.schema_text())
        return
    if not files:
        raise ConfigError(
            "rules test: no file specified", "pass a rule test file; --schema prints its schema"
        )
    results = {}
    for path in files:
        results[str(path)] = run_file(file.load(path), path.absolute().parent)
        if not as_json:
            for line in lines(str(path), results[str(path)]):
                echo(line)
    if as_json:
        show_json(_as_data(results))
    else:
        echo(summary(results))
    if junit is not None:
        try:
            junit.write_bytes(junit_xml(results))
        except OSError as error:
            raise ConfigError(
                f"--junit {junit}: {error.strerror}", "use a file that can be written"
            ) from error
    if not all(result.passed for file_results in results.values() for result in file_results):
        raise typer.Exit(1)


def _as_data(results: Mapping[str, Sequence[TestResult]]) -> list[dict[str, Any]]:
    return [
        {"file": name, "tests": [{**asdict(result), "passed": result.passed} for result in file_results]}
        for name, file_results in results.items()
    ]
