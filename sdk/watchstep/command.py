"""The ``watchstep`` command. ``run``, ``sync``, ``check-config FILE``, ``trace``, ``report``, ``replay``, ``explain``, ``bundles``, ``samples``, ``skip-list``, ``diff``, ``audit`` and ``--version`` belong to the SDK; other packages provide the other commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points

import watchstep
from watchstep.errors import ConfigError, WatchstepError
from watchstep.platform.terminal_text import printable_lines

EXIT_ERROR = 2


def main() -> None:
    """Run the command line. User errors are printed in two lines, with exit code 2."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"{watchstep.__version__}\n")
        return
    try:
        if arguments[:1] == ["run"]:
            from watchstep.wrapper.run_command import main as run

            run(arguments[1:])
        if arguments[:1] == ["sync"]:
            from watchstep.wrapper.store_commands import sync_main

            sync_main(arguments[1:])
        if arguments[:1] == ["check-config"]:
            from watchstep.wrapper.check_config import main as check_config

            check_config(arguments[1:])  # returns without a file: the service's configuration is checked
        if arguments[:1] == ["diff"]:
            from watchstep.wrapper.diff_command import main as diff

            diff(arguments[1:])
        if arguments[:1] == ["audit"]:
            from watchstep.wrapper.audit.audit_command import main as audit

            audit(arguments[1:])
        if arguments[:1] == ["samples"]:
            from watchstep.wrapper.samples_command import samples_main

            samples_main(arguments[1:])
        if arguments[:1] == ["skip-list"]:
            from watchstep.wrapper.samples_command import skip_list_main

            skip_list_main(arguments[1:])
        if arguments[:1] == ["replay"]:
            from watchstep.wrapper.replay_command import main as replay

            replay(arguments[1:])
        if arguments[:1] == ["explain"]:
            from watchstep.wrapper.explain_command import main as explain

            explain(arguments[1:])
        if arguments[:1] == ["bundles"]:
            from watchstep.wrapper.replay_command import bundles_main

            bundles_main(arguments[1:])
        if arguments[:1] == ["trace"]:
            from watchstep.wrapper.trace_command import main as trace

            trace(arguments[1:])
        if arguments[:1] == ["report"]:
            from watchstep.wrapper.report_command import main as report

            report(arguments[1:])
        _application()(arguments)
    except WatchstepError as error:
        sys.stderr.write(f"watchstep: {printable_lines(error)}\n")
        raise SystemExit(EXIT_ERROR) from None


def _application() -> Callable[[list[str]], None]:
    """Return the command line application of the service package."""
    try:
        (entry,) = entry_points(group="watchstep.commands")
        application: Callable[[list[str]], None] = entry.load()
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"this command is not installed ({error})", "pip install 'watchstep[server]'"
        ) from error
    return application


if __name__ == "__main__":
    main()
