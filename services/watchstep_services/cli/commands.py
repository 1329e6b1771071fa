"""The table of all commands: where each is defined, and its line in the help.

Help and shell completion read this table, so that they import no command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class CommandEntry(NamedTuple):
    """A command of the table.

    Attributes:
        module: module of this package that defines the command.
        attribute: the function or `typer.Typer` in that module.
        summary: its line in ``watchstep --help``: the first paragraph of its own help.
    """

    module: str
    attribute: str
    summary: str


class GroupEntry(NamedTuple):
    """A group whose commands are loaded one by one.

    Attributes:
        commands: the table of the group.
        summary: its line in ``watchstep --help``.
    """

    commands: Mapping[str, CommandEntry]
    summary: str


RUNS = {
    "list": CommandEntry(
        "runs.recorded",
        "list_runs",
        "List the runs of a store, the newest first, with their alerts where a service of this machine watches it; or those that a service knows. Token for the latter: WATCHSTEP_TOKEN.",
    ),
    "show": CommandEntry(
        "runs.recorded",
        "show_run",
        "Show a run: its state, steps, workers, losses, how it ended, its incidents where a service watches it, and what was recorded.",
    ),
    "stats": CommandEntry("runs.recorded", "show_statistics", "Show figures of one tensor by step."),
    "compact": CommandEntry(
        "runs.recorded",
        "compact_run",
        "Write a finished run anew, by tensor and step: a series is then read at once. Safe to repeat.",
    ),
    "diff": CommandEntry(
        "runs.recorded",
        "diff_runs",
        "Show the first step and tensor at which two runs differ, and what differs. Exit code 1 where they do.",
    ),
    "acknowledge": CommandEntry(
        "runs.alerts",
        "acknowledge",
        "Take an alert that fires up: it is not repeated until it is over. Token: WATCHSTEP_TOKEN.",
    ),
    "alerts": CommandEntry(
        "runs.alerts",
        "alerts",
        "Show a run's alerts, explained: those that fire first, then those that are over, the last changed first; and rules that cannot be evaluated. Token: WATCHSTEP_TOKEN.",
    ),
    "events": CommandEntry(
        "runs.events",
        "events",
        "Show a run's events in the order in which they came; <project>/ alone is all runs. Token: WATCHSTEP_TOKEN.",
    ),
    "actions": CommandEntry(
        "runs.events",
        "actions",
        "Show what a run's events caused, and how often it was tried. Token: WATCHSTEP_TOKEN.",
    ),
    "stop": CommandEntry(
        "runs.events",
        "stop",
        "Have a run stop: its workers are asked, then its job is ended. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "stops": CommandEntry(
        "runs.events",
        "stops",
        "Show every stop of a run, asked for or only recorded: by whose word, on which evidence, each try. Token: WATCHSTEP_TOKEN.",
    ),
    "allow-restart": CommandEntry(
        "runs.control",
        "allow_restart",
        "Let new attempts of a stopped run start. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "snapshot": CommandEntry(
        "runs.control",
        "snapshot",
        "Have a run's workers keep the full tensors of a step. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "cadence": CommandEntry(
        "runs.control",
        "cadence",
        "Have a run's collections measured every so many steps. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "hold": CommandEntry(
        "runs.control",
        "hold",
        "Keep a run whole, whatever its project's policy says. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "release": CommandEntry(
        "runs.control",
        "release",
        "Release the hold on a run: its project's policy applies again. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "delete": CommandEntry(
        "runs.control",
        "delete",
        "Delete a run that has ended, from the store and the service, soon. Token: WATCHSTEP_TOKEN, of an administrator.",
    ),
}
RULES = {
    "list": CommandEntry("rules", "list_rules", "List the rules."),
    "show": CommandEntry("rules", "show_rule", "Show what a rule tests, and its parameters."),
    "allow-stop": CommandEntry(
        "rules",
        "allow_stop",
        "Let a rule stop jobs of a project, exactly as it is now. Token: WATCHSTEP_TOKEN.",
    ),
    "backtest": CommandEntry(
        "backtest",
        "backtest",
        "Show which rules would have fired in recorded runs, when and where. Exit code 1 where a run or a rule fails.",
    ),
    "check": CommandEntry(
        "rules",
        "check",
        "Say all that is wrong with rule files, and what they do. Exit code 1 where one cannot be used.",
    ),
    "revoke-stop": CommandEntry(
        "rules", "revoke_stop", "Let a rule stop jobs of a project no longer. Token: WATCHSTEP_TOKEN."
    ),
    "schema": CommandEntry("rules", "schema", "Print the JSON schema of rule files, for editors."),
    "stop-grants": CommandEntry(
        "rules",
        "stop_grants",
        "List which rules were allowed to stop jobs of a project, by whom and why. Token: WATCHSTEP_TOKEN.",
    ),
    "test": CommandEntry(
        "rule_tests",
        "run_tests",
        "Test rules against series or recorded runs, and the alerts that are expected. Exit code 1 where one differs.",
    ),
}

COMMANDS: Mapping[str, CommandEntry | GroupEntry] = {
    "demo": CommandEntry(
        "demo",
        "demo",
        "Watch two trainings: the healthy one ends by itself, the faulty one is stopped and explained.",
    ),
    "serve": CommandEntry(
        "serve", "serve", "Watch a store: judge its runs while they go on, keep alerts, stop jobs."
    ),
    "api": CommandEntry(
        "processes",
        "api",
        "The API of a production service. On SIGTERM, finishes running requests and exits.",
    ),
    "worker": CommandEntry(
        "processes",
        "worker",
        "A worker of a production service: evaluates runs, tries actions. On SIGTERM, finishes running tasks and exits.",
    ),
    "scheduler": CommandEntry(
        "processes",
        "scheduler",
        "The scheduler of a production service, of which there is one: tells workers when to look for work.",
    ),
    "attach": CommandEntry(
        "jobs",
        "attach",
        "Have a job that was launched by other means judged by rules, and stopped by them. Safe to repeat. Token: "
        "WATCHSTEP_TOKEN, of an operator.",
    ),
    "watch": CommandEntry(
        "jobs",
        "watch",
        "Show how a run goes: steps, losses, rules, alerts and stops, until it has ended or Ctrl-C. Token: WATCHSTEP_TOKEN.",
    ),
    "check-config": CommandEntry(
        "database",
        "check_config",
        "Try every connection of the service: database, broker, stores. Exit code 1 where one does not work.",
    ),
    "export": CommandEntry(
        "runs.recorded", "export", "Write a run's figures and histograms as TensorBoard's event files."
    ),
    "run": CommandEntry("jobs", "run", "Start a program so that it records itself, with no change to it."),
    "sync": CommandEntry(
        "jobs",
        "sync",
        "Upload what recorders left on this machine when their store could not be reached. Safe to repeat.",
    ),
    "migrate-store": CommandEntry(
        "jobs",
        "migrate_store",
        "Rewrite runs that an earlier version recorded with the names that this version reads. Safe to repeat.",
    ),
    "database": CommandEntry(
        "database",
        "app",
        "The schema of the database of WATCHSTEP_DATABASE_URL, or of the service of a store on this machine.",
    ),
    "runs": GroupEntry(RUNS, "Recorded runs."),
    "rules": GroupEntry(RULES, "The rules."),
    "receivers": CommandEntry("receivers", "receivers", "Receivers of alerts."),
    "silences": CommandEntry(
        "receivers", "silences", "Silences: alerts that nobody is notified of for a while."
    ),
    "tokens": CommandEntry("tokens", "app", "Tokens for the API."),
    "projects": CommandEntry(
        "tenancy", "projects", "Projects: where their runs lie, and where their jobs may run."
    ),
    "stores": CommandEntry("tenancy", "stores", "Stores that projects can be put on."),
    "backends": CommandEntry("tenancy", "backends", "Backends that jobs may run on."),
}
