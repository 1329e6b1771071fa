"""Text of runs, recorders and other users never controls a terminal, in any command."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.cli.command_line import run_command
from tests.services.jobs import eventually
from watchstep import Client, Hook
from watchstep.platform.terminal_text import (
    MOST_CHARACTERS,
    MOST_LINES,
    escaped_json,
    printable,
    printable_lines,
)
from watchstep_launch import view
from watchstep_services import cli, demo
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

MARKUP = "[link=http://evil]x[/link] [bold]b[/bold] :warning:"
FORMATS = "\u202e\u2066\u200b\u2028"
CONTROLS = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f"
HOSTILE = f"{CONTROLS}{FORMATS}\nforged {MARKUP}"
PLAIN = f"{FORMATS} {MARKUP}"
"""What the API takes for one line of text."""

_COLOURS = re.compile(r"\r?\x1b\[([0-9;]*m|\?25[lh]|1A|2K)\r?")
"""What rich itself writes to a terminal: colours, and the moves of a progress bar."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with a service, a run that has an alert and a stop, and hostile text wherever it may be."""
    place = tmp_path_factory.mktemp("hostile") / "store"
    settings = load_settings(store=str(place), home=place / ".watchstep", sweep_seconds=0.05, port=0)
    with EmbeddedService(settings) as service:
        client = Client(service.url, service.operator_token, "p")
        hook = Hook(place, run="r", project="p")
        for step in range(60):
            hook.log({LOSS: math.nan if step >= 5 else 1.0, HOSTILE: 1.0})
            hook.step()
        hook.__exit__(ValueError, ValueError(HOSTILE), None)
        with Hook(place, run="other", project="p") as hook:
            hook.log({LOSS: 2.0})
            hook.step()
        eventually(lambda: [run for run in client.runs() if run.run == "r" and run.state == "failed"])
        eventually(
            lambda: any(alert.name == "nan_or_inf" and alert.raw["details"] for alert in client.alerts("r"))
        )
        yield place


AT = ("--store", "{store}")
IN_PROJECT = ("--project", "p", *AT)
LOSS = f"loss {HOSTILE}"
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": ("runs", "list", *AT),
    "show": ("runs", "show", "p/r", *AT),
    "stats": ("runs", "stats", "p/r", LOSS, *AT),
    "stats of an unknown tensor": ("runs", "stats", "p/r", HOSTILE[:-1], *AT),
    "diff": ("diff", "p/r", "p/other", *AT),
    "alerts": ("runs", "alerts", "p/r", *AT),
    "events": ("runs", "events", "p/r", *AT),
    "events as JSON": ("runs", "events", "p/r", "--json", *AT),
    "actions": ("runs", "actions", "p/r", *AT),
    "stop": ("runs", "stop", "p/r", "--reason", PLAIN, *AT),
    "stops": ("runs", "stops", "p/r", *AT),
    "acknowledge": ("runs", "acknowledge", "p/r", "nan_or_inf", "--comment", PLAIN, *AT),
    "acknowledged alerts": ("runs", "alerts", "p/r", *AT),
    "hold": ("runs", "hold", "p/r", "--reason", PLAIN, *AT),
    "watch": ("watch", "p/r", "--lines", *AT),
    "preview": ("silences", "preview", "name=nan_or_inf", *IN_PROJECT),
    "silence": ("silences", "create", "name=other", "--reason", PLAIN, *IN_PROJECT),
    "silences": ("silences", "list", *IN_PROJECT),
    "allow-stop": ("rules", "allow-stop", "nan_or_inf", "--run", "r", "--reason", PLAIN, *IN_PROJECT),
    "stop-grants": ("rules", "stop-grants", *IN_PROJECT),
    "token": ("tokens", "create", "--role", "viewer", "--name", MARKUP, *AT),
    "tokens": ("tokens", "list", *AT),
    "tokens as JSON": ("tokens", "list", "--json", *AT),
    "backtest": ("rules", "backtest", "p/r", *AT),
    "backtest as JSON": ("rules", "backtest", "p/r", "--json", "-", *AT),
    "unknown run": ("runs", "show", HOSTILE.replace("/", ""), *AT),
}
SHOW_TEXT = {
    "show",
    "diff",
    "alerts",
    "events",
    "events as JSON",
    "stops",
    "acknowledged alerts",
    "silences",
}
"""Commands that certainly show hostile text."""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_terminal_control_sequences(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, terminal: bool
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    done = run_command(*(word.format(store=store) if word == "{store}" else word for word in COMMANDS[name]))
    assert "Traceback" not in done.stderr
    assert not done.returncode or done.returncode == 1 or "hint: " in done.stderr
    shown = _COLOURS.sub("", done.stdout) + _COLOURS.sub("", done.stderr)
    for line in shown.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("forged")
    assert "]8;" not in done.stdout
    assert "\N{WARNING SIGN}" not in shown
    if name in SHOW_TEXT:
        assert "[link=http://evil]x" in re.sub(r"\s+", " ", shown)


def test_json_output_is_lossless(store: Path) -> None:
    done = run_command("rules", "backtest", "p/r", "--json", "-", "--store", store)
    texts: list[str] = []
    json.loads(done.stdout, object_hook=lambda held: texts.extend(map(str, held.values())))
    assert any(HOSTILE in text for text in texts)


def test_text_is_made_printable() -> None:
    assert printable("Größe 3 \N{GREEK SMALL LETTER SIGMA}") == "Größe 3 \N{GREEK SMALL LETTER SIGMA}"
    assert set(printable(CONTROLS + FORMATS + "\n\ud800")) <= {"\N{REPLACEMENT CHARACTER}", *"]0;owned[2J31m"}
    assert printable_lines("a\tb\x1b\nc") == "a       b\N{REPLACEMENT CHARACTER}\nc"
    told = {HOSTILE: ["\N{PILE OF POO}\U000e0001\x7f", "ä"]}
    shown = escaped_json(json.dumps(told, ensure_ascii=False, indent=1))
    assert json.loads(shown) == told
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "ä" in shown


def test_a_long_text_is_truncated_with_the_truncated_length() -> None:
    fits = "x" * MOST_CHARACTERS
    assert printable(fits) == fits
    assert printable(fits + "\x1by") == f"{fits} … (2 more characters)"
    assert printable(fits + "y" * 3_896_000) == f"{fits} … (3,896,000 more characters)"
    assert printable_lines(f"a\n{fits}y") == f"a\n{fits} … (1 more character)"
    shown = printable_lines("\n".join(map(str, range(MOST_LINES + 2)))).split("\n")
    assert shown[-2:] == [str(MOST_LINES - 1), "… (2 more lines)"]


def test_a_reason_of_megabytes_is_shown_in_part(tmp_path: Path) -> None:
    hook = Hook(tmp_path, project="p", run="r")
    hook.log(loss=1.0)
    hook.close()
    (end,) = (tmp_path / "p" / "r" / "end").rglob("*.json")
    end.write_text(json.dumps(json.loads(end.read_text()) | {"state": "failed", "reason": "x" * 3_900_000}))
    done = run_command("runs", "show", "p/r", "--store", tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "more characters)" in re.sub(r"\s+", " ", done.stdout)
    assert len(done.stdout) < 20_000


def test_all_output_of_commands_uses_one_module() -> None:
    """A new command that writes by itself would not be safe, whatever is tested above."""
    allowed = {"jobs.py", "main.py", "terminal.py"}
    writes = {"typer.echo", "print", "Console", "sys.stdout.write", "click.echo"}
    found = [
        f"{path.name}: {ast.unparse(node.func)}"
        for package in (cli, demo, view)
        for path in Path(package.__path__[0]).rglob("*.py")
        if path.name not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in writes
    ]
    assert found == ["digits.py: print"]  # the demo's training program itself
