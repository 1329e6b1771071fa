"""``watchstep rules check`` and ``watchstep rules schema``: rule files before they judge anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python.rule import PythonParams
from watchstep_rules.rule_files.checks import CheckResult, Remark, check_text
from watchstep_rules.rule_files.rule_file import text_of
from watchstep_rules.rule_files.schema import schema_text
from watchstep_services.cli.rule_words import after, counted, does, lasting
from watchstep_services.core.console import console, echo_own, show, table

_LINE = re.compile(r"line (\d+)")


def check(
    files: Annotated[list[Path], typer.Argument(help="Rule files.", show_default=False)],
) -> None:
    """Say all that is wrong with rule files, and what they do. Exit code 1 where one cannot be used."""
    results = [(path, _checked(path)) for path in files]
    out = console()
    for path, checked in results:
        for remark in checked.remarks:
            place = f" {remark.place}:" if remark.place else ""
            out.print(f"{path}:{remark.line}: {remark.level}:{place} {remark.text}", soft_wrap=True)
        if checked.configs:
            out.print(f"{path}: {counted(len(checked.configs), 'rule')}")
            show(_configs(checked.configs))
            for line in _isolations(checked.configs):
                out.print(line, soft_wrap=True)
        elif checked.ok:
            out.print(
                f"{path}:1: warning: no rules stand in it: nothing judges by it, the default rules neither;"
                " 'extends: defaults' takes these",
                soft_wrap=True,
            )
    if not all(checked.ok for _, checked in results):
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON schema of rule files, for editors."""
    echo_own(schema_text())


def _checked(path: Path) -> CheckResult:
    try:
        return check_text(text_of(path), str(path), path.absolute().parent)
    except RuleError as error:
        text = error.what.removeprefix(f"rule file {path}: ")
        line = _LINE.search(text)
        return CheckResult([Remark("error", int(line[1]) if line else 1, "", f"{text}; {error.hint}")], ())


def _isolations(configs: tuple[RuleConfig, ...]) -> list[str]:
    """How far the processes of Python rules are shut in, on this machine."""
    held = [(config.name, config.parameters) for config in configs]
    return [
        f"{name}: a program; its isolation here is {params.isolation}"
        for name, params in held
        if isinstance(params, PythonParams)
    ]


def _configs(configs: tuple[RuleConfig, ...]) -> Table:
    shown = table("=NAME", "JUDGES", "FIRES AFTER", "THEN")
    for config in configs:
        name = config.name if config.name == config.rule else f"{config.name} ({config.rule})"
        shown.add_row(name, _judges(config), _after(config), _then(config))
    return shown


def _judges(config: RuleConfig) -> str:
    needs, scope = config.implementation.needed(config.parameters), config.tensors
    said = scope.collection or ", ".join(needs.collections) or "all tensors"
    if scope.include is not None:
        said += f" that match {scope.include}"
    if scope.exclude is not None:
        said += f" but not {scope.exclude}"
    return said


def _after(config: RuleConfig) -> str:
    said = after(config)
    if config.keep_firing is not None:
        said += f"; over after {lasting(config.keep_firing)} without"
    return said


def _then(config: RuleConfig) -> str:
    said = [config.severity, *does(config)]
    if config.inhibits:
        said.append(f"keeps quiet: {', '.join(config.inhibits)}")
    return "; ".join(said)
