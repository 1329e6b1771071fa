"""Tables in the docs that follow from the code. ``python -m docs.tables`` writes them; a test compares them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import typer.main
from pydantic_core import PydanticUndefined

from watchstep.launch.run_command import parser as run_parser
from watchstep.launch.sync_command import parser as sync_parser
from watchstep_rules.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES
from watchstep_services.cli.app import app
from watchstep_services.settings import PREFIX, Settings

FOLDER = Path(__file__).parent
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- /table -->", re.DOTALL)
_OWN_PARSERS = {"watchstep run": run_parser, "watchstep sync": sync_parser}
_VARIABLES = {
    "WATCHSTEP_STORE": "Where runs lie; `./watchstep-runs` where neither it nor an argument is given.",
    "WATCHSTEP_PROJECT": "The project; `default` where it is not given.",
    "WATCHSTEP_RUN": "The run's id; a new one where it is not given.",
    "WATCHSTEP_ATTEMPT": "What all ranks of one launch share; set by `watchstep run`.",
    "WATCHSTEP_SERVICE": "URL of the service to announce to.",
    "WATCHSTEP_TOKEN": "A recorder's token for it.",
    "WATCHSTEP_OVERHEAD_BUDGET": "Share of the program's time that recording may take; `none` for everything always.",
    "WATCHSTEP_SPILL": "Folder for what waits while the store cannot be reached; in the user's cache where not given.",
    "WATCHSTEP_ON_STOP": "`ignore` or `raise`: what a stop does where `Hook(on_stop=…)` does not say.",
}


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def rules() -> str:
    """The rules, their parameters and their defaults."""

    def rows() -> Iterator[list[str]]:
        defaults = {config.rule: config for config in DEFAULT_RULES}
        for name, rule in sorted(RULES.items()):
            config = defaults.get(name)
            state = "off"
            if config is not None:
                state = f"{config.severity}, after {config.hold.steps} steps" + (
                    ", stops" if config.stops else ""
                )
            fields = rule.params_type.model_fields
            parameters = ", ".join(f"`{key}` {field.default}" for key, field in fields.items())
            yield [f"`{name}`", rule.summary, parameters, state, rule.merge.replace("_", " ")]

    return _table(["rule", "fires when", "parameters", "default", "judges"], rows())


def settings() -> str:
    """The service's settings."""

    def rows() -> Iterator[list[str]]:
        for name, field in Settings.model_fields.items():
            default = "" if field.default in {None, "", PydanticUndefined} else f"`{field.default}`"
            yield [f"`{PREFIX}{name.upper()}`", default, field.description or ""]

    return _table(["variable", "default", "meaning"], rows())


def variables() -> str:
    """What a training process reads from its environment."""
    return _table(["variable", "meaning"], ([f"`{name}`", text] for name, text in _VARIABLES.items()))


def commands() -> str:
    """The commands and their options."""

    def rows() -> Iterator[list[str]]:
        for path, command in _commands(typer.main.get_command(app), "watchstep"):
            if path in _OWN_PARSERS:
                known = _OWN_PARSERS[path]()._actions  # noqa: SLF001
                taken = [a.option_strings[-1] if a.option_strings else a.dest.upper() for a in known]
                yield [f"`{path}`", command.help or "", ", ".join(f"`{name}`" for name in taken)]
                continue
            options = [parameter for parameter in command.params if parameter.name != "help"]
            names = [max(option.opts, key=len) for option in options]
            named = [f"`{name if name.startswith('-') else name.upper()}`" for name in names]
            yield [f"`{path}`", command.help or "", ", ".join(named)]

    return _table(["command", "what it does", "takes"], rows())


def _commands(command: object, path: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    if isinstance(command, typer.core.TyperGroup):
        for name, child in command.commands.items():
            yield from _commands(child, f"{path} {name}")
    else:
        assert isinstance(command, typer.core.TyperCommand)
        yield path, command


TABLES: dict[str, Callable[[], str]] = {
    "rules": rules, "settings": settings, "variables": variables, "commands": commands,
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its tables as they should be."""
    return _PLACE.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}<!-- /table -->", text)


def pages() -> list[Path]:
    """The pages that hold tables."""
    return [page for page in sorted(FOLDER.glob("*.md")) if _PLACE.search(page.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
