"""``watchstep rules``: lists and explains rules, checks rule files, and manages permissions to stop jobs.

``watchstep rules test``: runs rule tests, which define series and the expected alerts.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from watchstep.errors import ConfigError, NotFoundError, RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.config.rule_config import KeepFiring, MinimumDuration, RuleConfig
from watchstep_rules.custom.python_rule import PythonParams
from watchstep_rules.engine.incident import sentence
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_rules.rule import SEVERITIES, AnyRule
from watchstep_rules.rule_files.checks import CheckResult, Remark, check_text
from watchstep_rules.rule_files.rule_file import schema_text, text_of
from watchstep_rules.testing import file
from watchstep_rules.testing.running import TestResult, junit_xml, lines, run_file, summary
from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    JsonOption,
    ProjectOption,
    ReasonOption,
    ServiceOption,
    StoreOption,
    call,
    default_project,
    service_of,
)
from watchstep_services.core.console import console, echo, echo_own, moment, show, show_json, table


def list_rules(as_json: JsonOption = False) -> None:
    """List the rules.

    Examples:
        watchstep rules list
        watchstep rules list --json
    """
    defaults = {config.rule: config for config in DEFAULT_RULES}
    entries = []
    for name, rule in sorted(RULES.items()):
        config = defaults.get(name)
        state = "off" if config is None else config.severity + (", stops" if config.stops else "")
        entries.append((name, state, rule.summary))
    entries += [(name, "your own", rule.summary) for name, rule in sorted(KINDS.items())]
    if as_json:
        show_json([{"name": name, "default": state, "summary": summary} for name, state, summary in entries])
        return
    rows = table("=RULE", "DEFAULT", "FIRES WHEN")
    for entry in entries:
        rows.add_row(*entry)
    show(rows)


def show_rule(
    name: Annotated[str, typer.Argument(help="Name of the rule.")], as_json: JsonOption = False
) -> None:
    """Show what a rule tests, and its parameters.

    Examples:
        watchstep rules show exploding_gradient
        watchstep rules show exploding_gradient --json
    """
    rule = _find(name)
    if as_json:
        show_json(
            {
                "name": rule.name,
                "summary": rule.summary,
                "description": inspect.getdoc(type(rule)) or "",
                "collections": list(rule.needs.collections),
                "parameters": rule.params_type.model_json_schema(),
                "usual_causes": list(rule.usual_causes),
                "what_to_try": list(rule.what_to_try),
                "cannot_distinguish": list(rule.cannot_distinguish),
            }
        )
        return
    out = console()
    out.print(Text.assemble((rule.name, "bold"), f": {rule.summary}"))
    out.print()
    out.print(Text(inspect.getdoc(type(rule)) or ""), soft_wrap=True)
    collections = ", ".join(rule.needs.collections) or "all tensors"
    how = "by the clock, also without rows" if rule.clock else rule.merge.replace("_", " ")
    out.print()
    out.print(f"Evaluates: {collections}; {how}.")
    for line in _by_default(rule):
        out.print(line, highlight=False, soft_wrap=True)
    out.print()
    show(_parameters(rule))
    sections = {
        "Usual causes": rule.usual_causes,
        "What to try": rule.what_to_try,
        "What it cannot distinguish": rule.cannot_distinguish,
    }
    for title, sentences in sections.items():
        if sentences:
            out.print()
            out.print(f"{title}:")
            for text in sentences:
                out.print(f"- {sentence(text)}", highlight=False, soft_wrap=True)


def _find(name: str) -> AnyRule:
    """Return the rule of a name.

    Raises:
        RuleError: the rule does not exist; the hint lists similar names first.
    """
    rules = {**RULES, **KINDS}
    if name in rules:
        return find_rule(name)
    close = difflib.get_close_matches(name, rules, n=3)
    suggestion = [f"did you mean {' or '.join(close)}?"] if close else []
    names = textwrap.wrap(", ".join(sorted(rules)), 96)
    raise RuleError(f"unknown rule {name!r}", "\n  ".join([*suggestion, "use one of:", *names]))


def _by_default(rule: AnyRule) -> Iterator[str]:
    """Yield the settings of a rule among the default rules."""
    config = next((config for config in DEFAULT_RULES if config.rule == rule.name), None)
    if config is None:
        reason = OFF_BY_DEFAULT.get(rule.name, "it requires your own definition")
        yield f"Off by default: {reason}."
        return
    until = f"resolved after {duration_text(config.keep_firing or config.hold)} without findings"
    yield f"By default: {'; '.join([config.severity, f'fires after {fires_after(config)}', until, *actions_of(config)])}."
    if config.inhibits:
        yield f"Inhibits while it fires: {', '.join(config.inhibits)}."


def _parameters(rule: AnyRule) -> Table:
    output = table("=PARAMETER", "TYPE", "DEFAULT", "MEANING")
    schema = rule.params_type.model_json_schema()
    for name, parameter in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        default = "required" if required else str(parameter.get("default"))
        output.add_row(name, _type(parameter), default, parameter.get("description", ""))
    return output


def _type(schema: dict[str, Any]) -> str:
    """Return the type as text, for example ``number or null``."""
    return (
        " or ".join(_type(choice) for choice in schema["anyOf"])
        if "anyOf" in schema
        else str(schema.get("type", ""))
    )


_LINE = re.compile(r"line (\d+)")


def check(
    files: Annotated[list[Path], typer.Argument(help="Rule files.", show_default=False)],
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print what each rule evaluates, when it fires, and its actions."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report all errors of rule files, and the actions of their rules. Exit code 1 if a file cannot be used.

    Examples:
        watchstep rules check rules.yaml
        watchstep rules check rules.yaml --verbose
        watchstep rules check rules/*.yaml --json
    """
    results = [(path, _checked(path)) for path in files]
    if as_json:
        show_json([_check_as_data(path, checked) for path, checked in results])
        raise typer.Exit(0 if all(checked.ok for _, checked in results) else 1)
    out = console()
    for path, checked in results:
        for remark in checked.remarks:
            location = f" {remark.place}:" if remark.place else ""
            out.print(f"{path}:{remark.line}: {remark.level}:{location} {remark.text}", soft_wrap=True)
        if checked.configs:
            out.print(f"{path}: {_counts(checked.configs)}", soft_wrap=True)
            if verbose:
                show(_configs(checked.configs))
            else:
                for line in _actions_of_file(checked.configs):
                    out.print(f"  {line}", highlight=False, soft_wrap=True)
            for line in _isolations(checked.configs):
                out.print(line, soft_wrap=True)
        elif checked.ok:
            out.print(
                f"{path}:1: warning: the file has no rules: it evaluates nothing, not even the default rules;"
                " add 'extends: defaults' to use them",
                soft_wrap=True,
            )
    if not all(checked.ok for _, checked in results):
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON schema of rule files, for editors.

    Examples:
        watchstep rules schema > rules.schema.json
    """
    echo_own(schema_text())


def _check_as_data(path: Path, checked: CheckResult) -> dict[str, Any]:
    return {
        "file": str(path),
        "ok": checked.ok,
        "remarks": [
            {"line": remark.line, "level": remark.level, "place": remark.place, "text": remark.text}
            for remark in checked.remarks
        ],
        "rules": [
            {
                "name": config.name,
                "rule": config.rule,
                "evaluates": _evaluates(config),
                "fires_after": _fires_after(config),
                "actions": _actions(config),
            }
            for config in checked.configs
        ],
    }


def _checked(path: Path) -> CheckResult:
    try:
        return check_text(text_of(path), str(path), path.absolute().parent)
    except RuleError as error:
        text = error.what.removeprefix(f"rule file {path}: ")
        line = _LINE.search(text)
        return CheckResult([Remark("error", int(line[1]) if line else 1, "", f"{text}; {error.hint}")], ())


def _isolations(configs: tuple[RuleConfig, ...]) -> list[str]:
    """Return a line per Python rule with the isolation of its process on this machine."""
    named_parameters = [(config.name, config.parameters) for config in configs]
    return [
        f"{name}: Python rule; isolation on this machine: {params.isolation}"
        for name, params in named_parameters
        if isinstance(params, PythonParams)
    ]


def _configs(configs: tuple[RuleConfig, ...]) -> Table:
    output = table("=NAME", "EVALUATES", "FIRES AFTER", "ACTIONS")
    for config in configs:
        name = config.name if config.name == config.rule else f"{config.name} ({config.rule})"
        output.add_row(name, _evaluates(config), _fires_after(config), _actions(config))
    return output


_MOST_NAMES = 5
"""Maximum number of rule configs that a line of the summary names."""


def _counts(configs: Sequence[RuleConfig]) -> str:
    """Return the number of rule configs, and that of each severity."""
    by_severity = Counter(config.severity for config in configs)
    parts = [
        f"{by_severity[severity]} {severity}" for severity in reversed(SEVERITIES) if by_severity[severity]
    ]
    return f"{counted(len(configs), 'rule')} ({', '.join(parts)})"


def _actions_of_file(configs: Sequence[RuleConfig]) -> Iterator[str]:
    """Yield each action with the rule configs that take it. The stop comes first, also if no rule config takes it."""
    names: dict[str, list[str]] = {"stops the job": []}
    for config in configs:
        for action in actions_of(config):
            names.setdefault(action, []).append(config.name)
    for action, takers in names.items():
        more = f", and {len(takers) - _MOST_NAMES} more" if len(takers) > _MOST_NAMES else ""
        yield f"{action}: {', '.join(takers[:_MOST_NAMES]) or 'no rule'}{more}"


def _evaluates(config: RuleConfig) -> str:
    needs, scope = config.implementation.needed(config.parameters), config.tensors
    tensors = scope.collection or ", ".join(needs.collections) or "all tensors"
    if scope.include is not None:
        tensors += f" that match {scope.include}"
    if scope.exclude is not None:
        tensors += f" but not {scope.exclude}"
    return tensors


def _fires_after(config: RuleConfig) -> str:
    text = fires_after(config)
    if config.keep_firing is not None:
        text += f"; resolved after {duration_text(config.keep_firing)} without findings"
    return text


def _actions(config: RuleConfig) -> str:
    actions = [config.severity, *actions_of(config)]
    if config.inhibits:
        actions.append(f"inhibits {', '.join(config.inhibits)}")
    return "; ".join(actions)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(duration: MinimumDuration | KeepFiring) -> str:
    """Return the duration of ``for`` or ``keep_firing`` as text."""
    steps = counted(duration.steps, "step")
    return f"{steps} and {duration.seconds:g} s" if duration.seconds else steps


def fires_after(config: RuleConfig) -> str:
    """Return how long a finding must last until the rule fires. Rules by the clock count no steps."""
    if not config.implementation.clock:
        return duration_text(config.hold)
    return f"{config.hold.seconds:g} s" if config.hold.seconds else "one evaluation"


def name_of(config: RuleConfig) -> str:
    """Return the name of a rule config, with its rule if the names differ."""
    return config.name if config.name == config.rule else f"{config.name}, of rule {config.rule}"


def actions_of(config: RuleConfig) -> list[str]:
    """Return the actions of a rule config when it fires."""
    if config.dry_run:
        return ["dry run"]
    return [
        *(["stops the job"] if config.stops else []),
        *(f"posts to {urlsplit(url).hostname}" for url in config.webhooks),
        *(f"notifies {name}" for name in config.receivers),
    ]


RuleName = Annotated[str, typer.Argument(metavar="RULE", help="Name of the rule config.")]


def allow_stop(
    rule: RuleName,
    reason: ReasonOption,
    *,
    project: ProjectOption = "",
    run: Annotated[
        str,
        typer.Option(help="Run to take the rule config from; required if it differs between runs."),
    ] = "",
    digest: Annotated[str, typer.Option(help="Prefix of the digest of the rule config.")] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Allow a rule, exactly as it is configured now, to stop jobs of a project. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep rules allow-stop loss_spike --project vision --reason "reviewed for two weeks"
    """
    url, token = service_of(store, service)
    project = project or default_project()
    body = {"rule": rule, "reason": reason, "run": run, "digest": digest}
    grant = call("POST", f"{url}/v1/projects/{project}/stop-grants", token, body)
    console().print(
        f"{rule} may stop jobs of {project}: grant {grant['id']}, digest {grant['digest'][:12]}, {grant['judges']['params']}", soft_wrap=True,
    )  # fmt: skip


def revoke_stop(
    rule: RuleName,
    reason: ReasonOption,
    *,
    project: ProjectOption = "",
    digest: Annotated[str, typer.Option(help="Prefix of the digest of the grant to revoke.")] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Revoke the permission of a rule to stop jobs of a project. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep rules revoke-stop loss_spike --project vision --reason "too many false alarms"
    """
    url, token = service_of(store, service)
    project = project or default_project()
    grants_url = f"{url}/v1/projects/{project}/stop-grants"
    active = call("GET", f"{grants_url}?active=true&limit=1000", token)["grants"]
    grants = [grant for grant in active if grant["name"] == rule and grant["digest"].startswith(digest)]
    if not grants:
        raise NotFoundError(
            f"rule {rule!r} of project {project}: not allowed to stop jobs",
            "'watchstep rules stop-grants' lists the rules that may",
        )
    for grant in grants:
        call("POST", f"{grants_url}/{grant['id']}/revoke", token, {"reason": reason})
        console().print(f"{rule} may no longer stop jobs of {project}: grant {grant['id']}")


def stop_grants(
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the rules that are allowed to stop jobs of a project, with author and reason. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep rules stop-grants --project vision
        watchstep rules stop-grants --project vision --json
    """
    url, token = service_of(store, service)
    grants = call("GET", f"{url}/v1/projects/{project or default_project()}/stop-grants?limit=1000", token)[
        "grants"
    ]
    if as_json:
        show_json(grants)
        return
    rows = table(">ID", "=RULE", "=DIGEST", "SINCE", "BY", "REASON", "REVOKED")
    for grant in grants:
        revoked = f"{moment(grant['revoked_ns'])}: {grant['revoked_reason']}" if grant["revoked_ns"] else ""
        rows.add_row(
            str(grant["id"]), grant["name"], grant["digest"][:12], moment(grant["granted_ns"]), grant["granted_by"],
            grant["reason"], revoked,
        )  # fmt: skip
    show(rows)


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
