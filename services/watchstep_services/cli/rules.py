"""``watchstep rules``: which rules there are, and what they take."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.engine.explanation import sentence
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_rules.rule import AnyRule
from watchstep_services.cli.rule_words import after, does, lasting
from watchstep_services.core.console import console, show, table



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
