"""The table of all commands: the definition of each, and its line in the help.

Help and shell completion read this table, so that they import no command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class CommandEntry(NamedTuple):
    """A command.

    Attributes:
        module: module of this package that defines the command.
        attribute: the function or `typer.Typer` in that module.
        summary: its line in ``watchstep --help``: the first paragraph of its own help.
    """

    module: str
    attribute: str
    summary: str


class GroupEntry(NamedTuple):
    """A group of commands that are imported separately.

    Attributes:
        commands: the table of the group.
        summary: its line in ``watchstep --help``.
    """

    commands: Mapping[str, CommandEntry]
    summary: str


RUNS = {
    "list": CommandEntry(
        "runs.listing",
        "list_runs",
        "List the runs of a store, newest first, with the number of firing alerts if a service on this machine watches the store.",
    ),
    "show": CommandEntry(
        "runs.recorded",
        "show_run",
        "Show the state of a run: steps, workers, losses, how it ended, incidents, and what was recorded.",
    ),
    "stats": CommandEntry("runs.recorded", "show_statistics", "Show the statistics of a tensor by step."),
    "compact": CommandEntry(
        "runs.recorded",
        "compact_run",
        "Rewrite a finished run sorted by tensor and step, so that a series is read with one request. Safe to repeat.",
    ),
    "acknowledge": CommandEntry(
        "runs.alerts",
        "acknowledge",
        "Acknowledge a firing alert: notifications of it are not repeated until it is resolved. Token: WATCHSTEP_TOKEN.",
    ),
    "alerts": CommandEntry(
        "runs.alerts",
        "alerts",
        "Show and explain the alerts of a run: firing alerts first, then resolved ones, most recently changed first.",
    ),
    "events": CommandEntry(
        "runs.events",
        "events",
        "Show the events of a run in order; <project>/ shows those of all runs. Token: WATCHSTEP_TOKEN.",
    ),
    "actions": CommandEntry(
        "runs.events",
        "actions",
        "Show the actions that the events of a run caused, and the number of tries. Token: WATCHSTEP_TOKEN.",
    ),
    "stop": CommandEntry(
        "runs.control",
        "stop",
        "Stop a run: requests a stop from its workers, then ends its job. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "stops": CommandEntry(
        "runs.events",
        "stops",
        "Show every stop of a run, requested or only recorded: requester, evidence, attempts to stop. Token: WATCHSTEP_TOKEN.",
    ),
    "allow-restart": CommandEntry(
        "runs.control",
        "allow_restart",
        "Allow new attempts of a stopped run to start. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "snapshot": CommandEntry(
        "runs.control",
        "snapshot",
        "Request a snapshot: the workers of a run store the full tensors of a step. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "cadence": CommandEntry(
        "runs.control",
        "cadence",
        "Set how often the collections of a run are recorded, in steps. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "hold": CommandEntry(
        "runs.control",
        "hold",
        "Exempt a run from the retention policy of its project. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "release": CommandEntry(
        "runs.control",
        "release",
        "Release the hold on a run: the retention policy of its project applies again. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "delete": CommandEntry(
        "runs.control",
        "delete",
        "Delete a run that has ended, from the store and from the service. Token: WATCHSTEP_TOKEN, of an administrator.",
    ),
}
RULES = {
    "list": CommandEntry("rules", "list_rules", "List the rules."),
    "show": CommandEntry("rules", "show_rule", "Show what a rule tests, and its parameters."),
    "allow-stop": CommandEntry(
        "rules",
        "allow_stop",
        "Allow a rule, exactly as it is configured now, to stop jobs of a project. Token: WATCHSTEP_TOKEN.",
    ),
    "backtest": CommandEntry(
        "backtest",
        "backtest",
        "Show which rules would have fired in recorded runs, when and where. Exit code 1 if a run or a rule fails.",
    ),
    "check": CommandEntry(
        "rules",
        "check",
        "Report all errors of rule files, and the actions of their rules. Exit code 1 if a file cannot be used.",
    ),
    "revoke-stop": CommandEntry(
        "rules",
        "revoke_stop",
        "Revoke the permission of a rule to stop jobs of a project. Token: WATCHSTEP_TOKEN.",
    ),
    "schema": CommandEntry("rules", "schema", "Print the JSON schema of rule files, for editors."),
    "stop-grants": CommandEntry(
        "rules",
        "stop_grants",
        "List the rules that are allowed to stop jobs of a project, with author and reason. Token: WATCHSTEP_TOKEN.",
    ),
    "test": CommandEntry(
        "rules",
        "run_tests",
        "Run rule tests: series or recorded runs, and the expected alerts. Exit code 1 if a test fails.",
    ),
}

COMMANDS: Mapping[str, CommandEntry | GroupEntry] = {
    "demo": CommandEntry(
        "demo",
        "demo",
        "Run the demo: a healthy training that completes, and a faulty one that is stopped and explained.",
    ),
    "serve": CommandEntry(
        "serve",
        "serve",
        "Run the service for a store: evaluate its runs while they record, manage alerts, stop jobs.",
    ),
    "api": CommandEntry(
        "processes",
        "api",
        "Run the API of a production service. On SIGTERM, finishes running requests and exits.",
    ),
    "worker": CommandEntry(
        "processes",
        "worker",
        "Run a worker of a production service: evaluates runs and delivers actions. On SIGTERM, finishes running tasks and exits.",
    ),
    "scheduler": CommandEntry(
        "processes",
        "scheduler",
        "Run the scheduler of a production service, which sends periodic tasks to the workers. Run exactly one.",
    ),
    "attach": CommandEntry(
        "jobs",
        "attach",
        "Attach rules to a job that was launched by other means, so that they can stop it. Safe to repeat. Token: WATCHSTEP_TOKEN, of an operator.",
    ),
    "watch": CommandEntry(
        "jobs",
        "watch",
        "Show the progress of a run until it ends: steps, losses, rules, alerts and stops. Token: WATCHSTEP_TOKEN.",
    ),
    "check-config": CommandEntry(
        "database",
        "check_config",
        "Check a capture file, or without one the configuration of the service: connects to database, broker and stores. Exit code 1 if a check fails.",
    ),
    "export": CommandEntry(
        "runs.recorded", "export", "Write the statistics and histograms of a run as TensorBoard event files."
    ),
    "run": CommandEntry("jobs", "run", "Run a program that records itself, without a change to its code."),
    "sync": CommandEntry(
        "jobs",
        "sync",
        "Upload segments that recorders kept on this machine while their store was unreachable. Safe to repeat.",
    ),
    "trace": CommandEntry(
        "jobs",
        "trace",
        "Name the first bad operation of a trace, with its source line. Exit code 1 if there is one.",
    ),
    "report": CommandEntry(
        "jobs",
        "report",
        "Write what happened to a run as one HTML file that needs no server and no network.",
    ),
    "replay": CommandEntry(
        "jobs",
        "replay",
        "Compute a bundled training step again, and name its first bad operation. Exit code 1 if it is not reproduced.",
    ),
    "explain": CommandEntry(
        "jobs",
        "explain",
        "Start a program again, compute a bundled step in its own loop, and name the first bad operation. Exit code 1 if it was not computed.",
    ),
    "bundles": CommandEntry(
        "jobs",
        "bundles",
        "List the bundles of a run, or show what a bundle contains and lacks.",
    ),
    "samples": CommandEntry(
        "jobs",
        "samples",
        "Show which samples a step was trained on, or which steps' samples are on the store.",
    ),
    "skip-list": CommandEntry(
        "jobs",
        "skip_list",
        "Write the samples of some steps to a file that a sampler leaves out when the training resumes.",
    ),
    "diff": CommandEntry(
        "jobs",
        "diff",
        "Show the first step and tensor at which two runs differ, and with traces the first operation. Exit code 1 if they differ.",
    ),
    "audit": CommandEntry(
        "jobs",
        "audit",
        "Run a program twice, and report what is not deterministic. Exit code 1 if the runs differ.",
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
        "tenancy", "projects", "Projects: the store of their runs, and the backends of their jobs."
    ),
    "stores": CommandEntry("tenancy", "stores", "Stores that projects can use."),
    "backends": CommandEntry("tenancy", "backends", "Backends that jobs may run on."),
}
