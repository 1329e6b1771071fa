"""``watchstep rules test``: files of series and of the alerts that are expected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from watchstep.errors import ConfigError
from watchstep_rules.testing import file
from watchstep_rules.testing.running import junit_xml, lines, run_file, summary
from watchstep_services.core.console import echo, echo_own


def run_tests(
    files: Annotated[list[Path] | None, typer.Argument(help="Rule test files.")] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write the results to this file as JUnit XML.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of rule test files.")
    ] = False,
) -> None:
    """Run rule tests: series or recorded runs, and the alerts that are expected. Exit code 1 if a test fails.

    Examples:
        watchstep rules test tests/*.yaml
        watchstep rules test tests/loss.yaml --junit results.xml
    """
    if schema:
        echo_own(file.schema_text())
        return
    if not files:
        raise ConfigError("rules test: no file is given", "name a rule test file; --schema prints its schema")
    results = {}
    for path in files:
        results[str(path)] = run_file(file.load(path), path.absolute().parent)
        for line in lines(str(path), results[str(path)]):
            echo(line)
    echo(summary(results))
    if junit is not None:
        try:
            junit.write_bytes(junit_xml(results))
        except OSError as error:
            raise ConfigError(
                f"--junit {junit}: {error.strerror}", "name a file that can be written"
            ) from error
    if not all(result.passed for file_results in results.values() for result in file_results):
        raise typer.Exit(1)
