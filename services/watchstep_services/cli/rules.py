"""``watchstep rules``: which rules there are, and what they take."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from watchstep_rules.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES, find_rule
from watchstep_services.cli.output import console, table

app = typer.Typer(help="The rules.", no_args_is_help=True)


@app.command("list")
def list_rules() -> None:
    """List the rules."""
    defaults = {config.rule: config for config in DEFAULT_RULES}
    shown = table("RULE", "DEFAULT", "FIRES WHEN")
    for name, rule in sorted(RULES.items()):
        config = defaults.get(name)
        state = "off" if config is None else config.severity + (", stops" if config.stops else "")
        shown.add_row(name, state, rule.summary)
    console().print(shown)


@app.command("show")
def show_rule(name: Annotated[str, typer.Argument(help="The rule's name.")]) -> None:
    """Show what a rule tests, and its parameters."""
    rule = find_rule(name)
    out = console()
    out.print(f"[bold]{rule.name}[/bold]: {rule.summary}\n")
    out.print(inspect.getdoc(type(rule)) or "", markup=False, highlight=False, soft_wrap=True)
    collections = ", ".join(rule.needs.collections)
    out.print(f"\nJudges: {collections}; {rule.merge.replace('_', ' ')}.\n")
    shown = table("PARAMETER", "TYPE", "DEFAULT", "MEANING")
    for parameter, schema in rule.params_type.model_json_schema()["properties"].items():
        default = schema.get("default")
        shown.add_row(parameter, str(schema.get("type", "")), str(default), schema.get("description", ""))
    out.print(shown)
