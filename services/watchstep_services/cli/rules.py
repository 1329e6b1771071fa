"""``watchstep rules``: which rules there are, and what they take.

``watchstep rules check`` and ``watchstep rules schema``: rule files before they judge anything.

A rule config in the words that the commands have for it.

``watchstep rules allow-stop`` and its likes: which rules may stop jobs of a project.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from watchstep.errors import NotFoundError, RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.config.rule_config import KeepFiring, MinimumDuration, RuleConfig
from watchstep_rules.custom.python.rule import PythonParams
from watchstep_rules.engine.explanation import sentence
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_rules.rule import AnyRule
from watchstep_rules.rule_files.checks import CheckResult, Remark, check_text
from watchstep_rules.rule_files.rule_file import text_of
from watchstep_rules.rule_files.schema import schema_text
from watchstep_services.cli.connection import DEFAULT_STORE, Project, Reason, Service, Store, call, service_of
from watchstep_services.core.console import console, echo_own, moment, show, table


def list_rules() -> None:
    """List the rules."""
    defaults = {config.rule: config for config in DEFAULT_RULES}
    shown = table("=RULE", "DEFAULT", "FIRES WHEN")
    for name, rule in sorted(RULES.items()):
        config = defaults.get(name)
        state = "off" if config is None else config.severity + (", stops" if config.stops else "")
        shown.add_row(name, state, rule.summary)
    for name, rule in sorted(KINDS.items()):
        shown.add_row(name, "your own", rule.summary)
    show(shown)


def show_rule(name: Annotated[str, typer.Argument(help="The rule's name.")]) -> None:
    """Show what a rule tests, and its parameters."""
    rule = _known(name)
    out = console()
    out.print(Text.assemble((rule.name, "bold"), f": {rule.summary}"))
    out.print()
    out.print(Text(inspect.getdoc(type(rule)) or ""), soft_wrap=True)
    collections = ", ".join(rule.needs.collections) or "all tensors"
    how = "by the clock, also where no row comes" if rule.clock else rule.merge.replace("_", " ")
    out.print()
    out.print(f"Judges: {collections}; {how}.")
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
            for words in sentences:
                out.print(f"- {sentence(words)}", highlight=False, soft_wrap=True)


def _known(name: str) -> AnyRule:
    """The rule of that name.

    Raises:
        RuleError: there is none; what was probably meant comes first.
    """
    every = {**RULES, **KINDS}
    if name in every:
        return find_rule(name)
    close = difflib.get_close_matches(name, every, n=3)
    meant = [f"did you mean {' or '.join(close)}?"] if close else []
    names = textwrap.wrap(", ".join(sorted(every)), 96)
    raise RuleError(f"unknown rule {name!r}", "\n  ".join([*meant, "use one of:", *names]))


def _by_default(rule: AnyRule) -> Iterator[str]:
    """What the default rules make of it."""
    config = next((config for config in DEFAULT_RULES if config.rule == rule.name), None)
    if config is None:
        why = OFF_BY_DEFAULT.get(rule.name, "it judges by what you write")
        yield f"Off by default: {why}."
        return
    until = f"over after {lasting(config.keep_firing or config.hold)} without"
    yield f"By default: {'; '.join([config.severity, f'fires after {after(config)}', until, *does(config)])}."
    if config.inhibits:
        yield f"Keeps quiet while it fires: {', '.join(config.inhibits)}."


def _parameters(rule: AnyRule) -> Table:
    shown = table("=PARAMETER", "TYPE", "DEFAULT", "MEANING")
    schema = rule.params_type.model_json_schema()
    for name, held in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        default = "required" if required else str(held.get("default"))
        shown.add_row(name, _type(held), default, held.get("description", ""))
    return shown


def _type(schema: dict[str, Any]) -> str:
    """``number or null`` of what may be either."""
    return (
        " or ".join(_type(one) for one in schema["anyOf"])
        if "anyOf" in schema
        else str(schema.get("type", ""))
    )


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


def counted(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def lasting(held: MinimumDuration | KeepFiring) -> str:
    """How long, of ``for`` and ``keep_firing``."""
    steps = counted(held.steps, "step")
    return f"{steps} and {held.seconds:g} s" if held.seconds else steps


def after(config: RuleConfig) -> str:
    """After how long it fires; one that watches the clock counts no steps."""
    if not config.implementation.clock:
        return lasting(config.hold)
    return f"{config.hold.seconds:g} s" if config.hold.seconds else "one look at the clock"


def named(config: RuleConfig) -> str:
    """Its name, and the rule where that is called otherwise."""
    return config.name if config.name == config.rule else f"{config.name}, of rule {config.rule}"


def does(config: RuleConfig) -> list[str]:
    """What follows when it fires."""
    if config.dry_run:
        return ["dry run"]
    return [
        *(["stops the job"] if config.stops else []),
        *(f"posts to {urlsplit(url).hostname}" for url in config.webhooks),
        *(f"notifies {name}" for name in config.receivers),
    ]


RuleName = Annotated[str, typer.Argument(metavar="RULE", help="The rule config's name.")]


def allow_stop(
    rule: RuleName,
    reason: Reason,
    *,
    project: Project = "default",
    run: Annotated[str, typer.Option(help="As it is in this run; needed where runs differ.")] = "",
    digest: Annotated[str, typer.Option(help="Or the beginning of its digest.")] = "",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Let a rule stop jobs of a project, exactly as it is now. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    body = {"rule": rule, "reason": reason, "run": run, "digest": digest}
    made = call("POST", f"{url}/v1/projects/{project}/stop-grants", token, body)
    console().print(
        f"{rule} may stop jobs of {project}: grant {made['id']}, digest {made['digest'][:12]}, {made['judges']['params']}", soft_wrap=True,
    )  # fmt: skip


def revoke_stop(
    rule: RuleName,
    reason: Reason,
    *,
    project: Project = "default",
    digest: Annotated[str, typer.Option(help="Only the one with this beginning of its digest.")] = "",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Let a rule stop jobs of a project no longer. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project}/stop-grants"
    grants = call("GET", f"{place}?active=true&limit=1000", token)["grants"]
    mine = [one for one in grants if one["name"] == rule and one["digest"].startswith(digest)]
    if not mine:
        raise NotFoundError(
            f"rule {rule!r} of project {project}: it has not been allowed to stop",
            "'watchstep rules stop-grants' lists those that have",
        )
    for grant in mine:
        call("POST", f"{place}/{grant['id']}/revoke", token, {"reason": reason})
        console().print(f"{rule} stops jobs of {project} no longer: grant {grant['id']}")


def stop_grants(project: Project = "default", store: Store = DEFAULT_STORE, service: Service = "") -> None:
    """List which rules were allowed to stop jobs of a project, by whom and why. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    shown = table(">ID", "=RULE", "=DIGEST", "SINCE", "BY", "WHY", "REVOKED")
    for one in call("GET", f"{url}/v1/projects/{project}/stop-grants?limit=1000", token)["grants"]:
        ended = f"{moment(one['revoked_ns'])}: {one['revoked_reason']}" if one["revoked_ns"] else ""
        shown.add_row(
            str(one["id"]), one["name"], one["digest"][:12], moment(one["granted_ns"]), one["granted_by"],
            one["reason"], ended,
        )  # fmt: skip
    show(shown)
