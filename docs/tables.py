"""Tables in the docs that follow from the code. ``python -m docs.tables`` writes them; a test compares them."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import typer.main
from fastapi import FastAPI
from pydantic_core import PydanticUndefined

from docs.default_sources import SOURCES
from docs.framework_support import FRAMEWORKS, FrameworkSupport, Judged
from watchstep.capture.document import document as capture_document
from watchstep.format.system_figures import FIGURES
from watchstep.wrapper.audit.audit_command import parser as audit_parser
from watchstep.wrapper.check_config import parser as check_config_parser
from watchstep.wrapper.diff_command import parser as diff_parser
from watchstep.wrapper.explain_command import parser as explain_parser
from watchstep.wrapper.replay_command import bundles_parser
from watchstep.wrapper.replay_command import parser as replay_parser
from watchstep.wrapper.report_command import parser as report_parser
from watchstep.wrapper.run_command import parser as run_parser
from watchstep.wrapper.samples_command import samples_parser, skip_list_parser
from watchstep.wrapper.store_commands import sync_parser
from watchstep.wrapper.trace_command import parser as trace_parser
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.custom.sql.guard import FUNCTIONS
from watchstep_rules.registry import RULES
from watchstep_rules.rule_files.presets import AMAZONS_RULES
from watchstep_rules.rule_files.rule_file import schema_text
from watchstep_rules.testing import file as rule_tests
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.policies import PERMISSION
from watchstep_services.api.openapi import document_text, operations
from watchstep_services.api.schemas.problems import PREFIX as PROBLEM
from watchstep_services.api.schemas.problems import TYPES
from watchstep_services.channels import receiver_file
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.receiver_file import KINDS
from watchstep_services.channels.wording import TEXT_FIELDS
from watchstep_services.cli.main import app
from watchstep_services.cli.rules import counted
from watchstep_services.core.settings import PREFIX, Settings, load_settings
from watchstep_services.core.telemetry.metrics import described
from watchstep_services.db.engine import open_database
from watchstep_services.db.metrics import FIGURES as DATABASE_FIGURES
from watchstep_services.service.context import Service

FOLDER = Path(__file__).parent
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- /table -->", re.DOTALL)
_OWN_PARSERS = {
    "watchstep run": run_parser,
    "watchstep sync": sync_parser,
    "watchstep check-config": check_config_parser,
    "watchstep trace": trace_parser,
    "watchstep report": report_parser,
    "watchstep replay": replay_parser,
    "watchstep explain": explain_parser,
    "watchstep bundles": bundles_parser,
    "watchstep samples": samples_parser,
    "watchstep skip-list": skip_list_parser,
    "watchstep diff": diff_parser,
    "watchstep audit": audit_parser,
}
_VARIABLES = {
    "WATCHSTEP_STORE": "Store of the runs. Default, without an argument: `./watchstep-runs`.",
    "WATCHSTEP_ALLOW_HTTP": "`1`: endpoints of GCS and Azure on other machines may be plain HTTP, so that the network sees the data and the "
    "credentials. Endpoints on this machine may be without it. The service reads it too.",
    "WATCHSTEP_PROJECT": "Project. Default: `default`.",
    "WATCHSTEP_RUN": "Id of the run. Default: a new one.",
    "WATCHSTEP_ATTEMPT": "Id of the attempt, which all ranks of one launch share; set by `watchstep run`.",
    "WATCHSTEP_SERVICE": "URL of the service that gets the announcements.",
    "WATCHSTEP_TOKEN": "Token of a recorder for that service.",
    "WATCHSTEP_CREDENTIALS": "`service`: the service issues AWS credentials that can write only this attempt.",
    "WATCHSTEP_OVERHEAD_BUDGET": "Share of the program's time that recording may take. `none`: everything is recorded at every step.",
    "WATCHSTEP_CAPTURE": "What is recorded if `Hook(config=…)` does not set it: the path of a capture file, or a capture document in JSON. "
    "Set by `watchstep run --capture` and `Estimator(capture=…)`.",
    "WATCHSTEP_NEEDS": "What the rules of a launch need the recorder to capture; set by `watchstep run --rules` and `Estimator`.",
    "WATCHSTEP_SPILL": "Folder for recorded data that waits while the store is unavailable. Default: a folder in the user's cache.",
    "WATCHSTEP_JOBS": "Folder for the records and logs of jobs that this machine launches. Default: `~/.watchstep/jobs`.",
    "WATCHSTEP_RECORDER_TOKEN": "Token of a launched job for the service. Default: a new one that can record only its run.",
    "WATCHSTEP_IDLE_SECONDS": "Seconds without jobs after which a service that was started for launched jobs ends. Default: 300.",
    "WATCHSTEP_QUIET": "If set, waiting for a job prints a line for each event, also in a terminal and in a notebook.",
    "WATCHSTEP_PROFILE": "Profile of the command line. Default: the `default` of the file.",
    "WATCHSTEP_PROFILES": "File of profiles. Default: `~/.config/watchstep/profiles.yaml`.",
    "WATCHSTEP_PROGRAM_PROCESS": "Set by `watchstep run`: id of the process that it becomes, whose end states that nothing was recorded.",
    "WATCHSTEP_LAUNCHED": "Attempt that a launcher has registered; `watchstep run` uses it and registers nothing.",
    "WATCHSTEP_RESTARTS": "Number of times a cluster has restarted the same job; set by a backend.",
    "WATCHSTEP_EXPLAIN": "`1`: the step that stops the training by the gate policy, `stop` by default, is first computed again under a trace, if `Hook(explain=…)` does not state it.",
    "WATCHSTEP_EXPLAINED_BUNDLE": "Set by `watchstep explain`: the bundle of the step that the program computes after its first update.",
    "WATCHSTEP_ON_NONFINITE": "The gate policy if `Hook(on_nonfinite=…)` does not set it: `record`, `skip`, `skip:N` or `stop`.",
    "WATCHSTEP_ON_STOP": "Effect of a stop if `Hook(on_stop=…)` does not set it: `ignore`; `raise` or `stop`; `checkpoint`: the "
    "program's function or its trainer first saves a checkpoint.",
    "WATCHSTEP_RESUME_FROM": "Checkpoint to continue from, if a stopped run was launched again; `watchstep.resume_from()` returns it.",
    "WATCHSTEP_LAUNCH": "Set by `watchstep run`: work that the launch left to the recorder, such as the registration.",
    "WATCHSTEP_STORE_ID": "Set by `watchstep run` and by an `Estimator` whose jobs see this machine's files: the id in the marker of a local store, and the store's URL. The program writes to no other "
    "store at that URL.",
    "WATCHSTEP_FIRST_STEP": "Number of the first step if `Hook(first_step=…)` does not set it.",
    "WATCHSTEP_AUDIT": "Set by `watchstep audit`: folder for the reports of the audited program.",
    "WATCHSTEP_AUDIT_STEPS": "Set by `watchstep audit`: number of steps after which the program is stopped.",
    "WATCHSTEP_AUDIT_SEED": "Set by `watchstep audit --seed`: seed that the program gets at its start.",
    "WATCHSTEP_TRACE": "Steps whose operations are traced, as `100:103,5000`, if `Hook(trace=…)` does not set them.",
    "WATCHSTEP_MIRROR": "Tools that alerts and series are mirrored into if `Hook(mirror=…)` does not set them: `wandb`, `mlflow`, `trackio`, `tensorboard:FOLDER`, separated by commas.",
    "WATCHSTEP_MIRROR_SERIES": "Series that are mirrored, unless the program passes a `Mirror`: `losses`, `metrics` and `COLLECTION/FIGURE`, separated by commas.",
    "WATCHSTEP_TENSORBOARD": "Folder for TensorBoard event files that are written during the run, if `Hook(tensorboard=…)` does not set it.",
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
                state = f"{config.severity}, after {counted(config.hold.steps, 'step')}"
                state += f", until {config.keep_firing.steps} are clean" if config.keep_firing else ""
                state += ", stops" if config.stops else ""
            fields = rule.params_type.model_fields
            parameters = ", ".join(f"`{key}` {field.default}" for key, field in fields.items())
            yield [f"`{name}`", rule.summary, parameters, state, rule.merge.replace("_", " ")]

    return _table(["rule", "fires when", "parameters", "default", "evaluation"], rows())


def defaults() -> str:
    """Parameters of the default rules: their sources, and the results at half and twice the default."""
    measured = json.loads((FOLDER / "margins.json").read_text(encoding="utf-8"))

    def did(name: str, of: int) -> str:
        right, alarms = measured["configs"].get(name, (None, None))
        return "" if right is None else f"{right} of {of}, {alarms} false"

    def rows() -> Iterator[list[str]]:
        for config in DEFAULT_RULES:
            of = measured["faulty"].get(config.rule, 0)
            for name, field in type(config.parameters).model_fields.items():
                varied = [did(f"{config.rule}/{name}/{word}", of) for word in ("half", "twice")]
                now = did(config.rule, of) if any(varied) else ""
                source = SOURCES.get(config.rule, {}).get(name, "its docstring")
                value = config.params.get(name, field.default)
                yield [f"`{config.rule}`", f"`{name}`", f"{value}", source, varied[0], now, varied[1]]

    return _table(["rule", "parameter", "default", "source", "at half", "at the default", "at twice"], rows())


def limits() -> str:
    """What the default rules cannot distinguish."""

    def rows() -> Iterator[list[str]]:
        for config in DEFAULT_RULES:
            yield [f"`{config.rule}`", "<br>".join(RULES[config.rule].cannot_distinguish)]

    return _table(["rule", "cannot distinguish"], rows())


_WORDS: dict[Judged, str] = {"yes": "yes", "opt-in": "opt-in", "with data": "with data", "no": "no"}


def frameworks() -> str:
    """What the adapter of each framework provides."""
    lines: dict[str, Callable[[FrameworkSupport], str]] = {
        "record with": lambda framework: framework.adapter,
        "without a change, by `watchstep run`": lambda _: "yes",
        "a step is": lambda framework: framework.step,
        "probes": lambda framework: framework.probes,
        "hyperparameters": lambda framework: framework.hyperparameters,
        "full tensors": lambda framework: framework.saved,
        '`on_nonfinite="stop"` stops': lambda framework: framework.nonfinite_stop or "no",
        "a guard stops": lambda framework: framework.guard,
        '`on_nonfinite="skip"`': lambda framework: framework.nonfinite_skip,
        "a stop by the service": lambda _: "yes",
    }
    rows = ([title, *map(cell, FRAMEWORKS)] for title, cell in lines.items())
    return _table(["", *(framework.name for framework in FRAMEWORKS)], rows)


def framework_collections() -> str:
    """The collections that each framework has."""
    names = dict.fromkeys(
        name for framework in FRAMEWORKS for name in (*framework.collections, *framework.on_data)
    )
    rows = ([f"`{name}`", *(_WORDS[framework.records(name)] for framework in FRAMEWORKS)] for name in names)
    return _table(["collection", *(framework.name for framework in FRAMEWORKS)], rows)


def framework_rules() -> str:
    """The default rules that have something to judge in each framework."""
    rows = (
        [f"`{config.name}`", *(_WORDS[framework.judges(config)] for framework in FRAMEWORKS)]
        for config in DEFAULT_RULES
    )
    return _table(["rule", *(framework.name for framework in FRAMEWORKS)], rows)


def sagemaker() -> str:
    """Amazon's rules, their parameters and defaults, and whether the rules here give the same results."""

    def shown(default: object) -> str:
        return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)

    def rows() -> Iterator[list[str]]:
        for one in AMAZONS_RULES:
            fields = one.implementation.params_type.model_fields
            parameters = ", ".join(f"`{name}` {shown(field.default)}" for name, field in fields.items())
            agreement = f"*differs*: {one.how}" if one.how else "same"
            listed = "" if one.in_preset else " (not in the preset)"
            yield [one.name, f"`{one.rule}`{listed}", parameters, agreement]

    return _table(["SageMaker", "here", "parameters", "agreement"], rows())


def settings() -> str:
    """The service's settings."""

    def rows() -> Iterator[list[str]]:
        for name, field in Settings.model_fields.items():
            shown = "" if field.default in {None, PydanticUndefined} else str(field.default)
            default = f"`{shown}`" if shown else ""
            yield [f"`{PREFIX}{name.upper()}`", default, field.description or ""]

    return _table(["variable", "default", "meaning"], rows())


def system() -> str:
    """The figures of the process and its machine."""
    rows = ([f"`{figure.name}`", figure.of, figure.unit, figure.meaning] for figure in FIGURES)
    return _table(["tensor", "of", "unit", "meaning"], rows)


def metrics() -> str:
    """The metrics for Prometheus: those of processes, then those of the database."""

    def rows() -> Iterator[list[str]]:
        held = [(name, "gauge", labels, text) for name, (labels, text) in DATABASE_FIGURES.items()]
        for name, kind, labels, meaning in (*sorted(described()), *held):
            yield [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), meaning]

    return _table(["metric", "type", "labels", "meaning"], rows())


def recorder_variables() -> tuple[str, ...]:
    """Names of the variables that a training process reads."""
    return tuple(_VARIABLES)


def variables() -> str:
    """Environment variables of a training process."""
    return _table(["variable", "meaning"], ([f"`{name}`", text] for name, text in _VARIABLES.items()))


def commands() -> str:
    """The commands and their options."""

    def rows() -> Iterator[list[str]]:
        for path, command in _commands(typer.main.get_command(app), "watchstep"):
            if path in _OWN_PARSERS:
                known = _OWN_PARSERS[path]()._actions  # noqa: SLF001
                taken = [a.option_strings[-1] if a.option_strings else a.dest.upper() for a in known]
                yield [f"`{path}`", _summary(command), ", ".join(f"`{name}`" for name in taken)]
                continue
            options = [parameter for parameter in command.params if parameter.name != "help"]
            names = [max(option.opts, key=len) for option in options]
            named = [f"`{name if name.startswith('-') else name.upper()}`" for name in names]
            yield [f"`{path}`", _summary(command), ", ".join(named)]

    return _table(["command", "what it does", "arguments"], rows())


def _summary(command: typer.core.TyperCommand) -> str:
    """The help of a command without its examples."""
    return " ".join((command.help or "").partition("\b")[0].split())


def sql_functions() -> str:
    """The functions that a SQL rule may call; operators are in the text."""
    return ", ".join(f"`{name}`" for name in sorted(FUNCTIONS) if name.isidentifier()) + "\n"


def routes() -> str:
    """The addresses of the API."""

    def rows() -> Iterator[list[str]]:
        for path, method, operation in operations(_api().openapi()):
            yield [f"`{method.upper()} {path}`", operation["summary"], operation.get(PERMISSION, "")]

    return _table(["address", "what it does", "permission"], rows())


def problems() -> str:
    """The types of problems."""
    rows = ([f"`{PROBLEM}{name}`", str(held.status), held.meaning] for name, held in TYPES.items())
    return _table(["type", "status", "when"], rows)


@cache
def _api() -> FastAPI:
    """The API of a service that does nothing: its database is never opened."""
    return create_app(
        Service(
            load_settings(),
            open_database(f"sqlite:///{tempfile.gettempdir()}/no-service.sqlite"),
            "http://127.0.0.1:8642",
            (),
        )
    )


def openapi_text() -> str:
    """The API's document."""
    return document_text(_api())


def receivers() -> str:
    """The kinds of receivers and their fields."""

    def rows() -> Iterator[list[str]]:
        shared = set(Receiver.model_fields) | {"kind"}
        for kind in KINDS:
            own = [name for name in kind.model_fields if name not in shared]
            said = ", ".join(
                f"`{name}`" + (" (secret)" if name in kind.secret_fields else "")
                + ("" if kind.model_fields[name].is_required() else "?") for name in own
            )  # fmt: skip
            by = "admins" if kind.administered else "operators"
            yield [
                f"`{get_args(kind.model_fields['kind'].annotation)[0]}`",
                inspect.getdoc(kind) or "",
                said,
                by,
            ]

    return _table(["kind", "what it does", "fields (`?`: optional)", "written by"], rows())


def message_fields() -> str:
    """The fields of receivers' templates."""
    every = {**TEXT_FIELDS, "label.NAME": "a label"}
    return _table(["field", "value"], ([f"`{name}`", text] for name, text in every.items()))


def _commands(command: object, path: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    if isinstance(command, typer.core.TyperGroup):
        context = command.make_context(path, [], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), f"{path} {name}")
    else:
        assert isinstance(command, typer.core.TyperCommand)
        yield path, command


TABLES: dict[str, Callable[[], str]] = {
    "rules": rules, "sagemaker": sagemaker, "defaults": defaults, "limits": limits, "settings": settings, "variables": variables, "commands": commands,
    "routes": routes, "problems": problems, "system": system, "metrics": metrics, "sql_functions": sql_functions, "receivers": receivers, "message_fields": message_fields,
    "frameworks": frameworks, "framework_collections": framework_collections, "framework_rules": framework_rules,
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its tables generated again."""
    return _PLACE.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}<!-- /table -->", text)


def pages() -> list[Path]:
    """The pages that contain tables."""
    return [page for page in sorted(FOLDER.rglob("*.md")) if _PLACE.search(page.read_text(encoding="utf-8"))]


SCHEMA = FOLDER / "rules.schema.json"
"""For editors; `watchstep rules schema` prints the same."""

CAPTURE_SCHEMA = FOLDER / "capture.schema.json"
"""For editors; `watchstep check-config --schema` prints the same."""

TESTS_SCHEMA = FOLDER / "rule-tests.schema.json"
"""For editors; `watchstep rules test --schema` prints the same."""

OPENAPI = FOLDER / "openapi.json"
"""The API's document, for generating a client; a running service serves its own at /openapi.json."""

RECEIVERS = FOLDER / "receivers.schema.json"
"""For editors; `watchstep receivers schema` prints the same."""

if __name__ == "__main__":
    RECEIVERS.write_text(receiver_file.schema_text(), encoding="utf-8")
    OPENAPI.write_text(openapi_text(), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    CAPTURE_SCHEMA.write_text(capture_document.schema_text(), encoding="utf-8")
    TESTS_SCHEMA.write_text(rule_tests.schema_text(), encoding="utf-8")
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
