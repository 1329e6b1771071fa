"""``watchstep rules test``: files of series and of the alerts that are expected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from watchstep.errors import ConfigError
from watchstep_rules.testing import file, report, running
from watchstep_services.core.console import echo, echo_own


def run_tests(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of rule tests.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the results as JUnit's XML, too.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of such files.")] = False,
) -> None:
    """Test rules against series or recorded runs, and the alerts that are expected. Exit code 1 where one differs."""
    if schema:
        echo_own(file.schema_text())
        return
    if not files:
        raise ConfigError(
            "rules test: no file is given", "name a file of rule tests; --schema says what stands in it"
        )
    results = {}
    for path in files:
        results[str(path)] = running.run_file(file.load(path), path.absolute().parent)
        for line in report.lines(str(path), results[str(path)]):
            echo(line)
    echo(report.summary(results))
    if junit is not None:
        try:
            junit.write_bytes(report.junit(results))
        except OSError as error:
            raise ConfigError(
                f"--junit {junit}: {error.strerror}", "name a file that can be written"
            ) from error
    if not all(result.passed for held in results.values() for result in held):
        raise typer.Exit(1)
