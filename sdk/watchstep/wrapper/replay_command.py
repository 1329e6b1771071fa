"""``watchstep replay``: compute a bundled step again, and name its first bad operation. ``watchstep bundles``: list and show bundles."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from watchstep.capture.provenance import changes_since
from watchstep.errors import ConfigError, NotFoundError, WatchstepError
from watchstep.format.bundle import Bundle, bundle_keys, open_bundle, open_bundle_file
from watchstep.format.layout import BundleKey
from watchstep.hook import STORE
from watchstep.platform.terminal_text import escaped_json, printable
from watchstep.reading.run_lookup import find_run

_DEFAULT_STORE = "watchstep-runs"
_EXIT_DIFFERENT, _EXIT_ERROR = 1, 2


def parser() -> argparse.ArgumentParser:
    """Return the options of ``watchstep replay``."""
    parsed = argparse.ArgumentParser(
        prog="watchstep replay",
        description="Compute a bundled training step again, report whether it is reproduced, and name the first bad operation with its source "
        "line. Exit code 0 if it is reproduced, 1 if not. Under torchrun each rank replays its own bundle. The program's file is run, so its "
        "training belongs under 'if __name__ == \"__main__\":'.",
    )
    parsed.add_argument(
        "bundle", metavar="BUNDLE", help="a bundle's file, or a run: its id, PROJECT/ID, folder or URL"
    )
    add_store(parsed)
    parsed.add_argument(
        "--program",
        required=True,
        metavar="FILE.py[:NAME]",
        help="the program's function that returns its watchstep.ReplayStep (default name: replay); MODULE:NAME as well",
    )
    parsed.add_argument(
        "--step", type=int, help="of a run: the bundle of this step (default: the first failing one)"
    )
    parsed.add_argument("--worker", type=int, help="of a run: the bundle of this rank (default: RANK, or 0)")
    parsed.add_argument("--attempt", help="of a run: the attempt (default: the newest with such a bundle)")
    parsed.add_argument(
        "--device", help="device of the replay (default: as recorded, if this machine has it)"
    )
    parsed.add_argument(
        "--precision",
        choices=("captured", "fp32", "fp64"),
        default="captured",
        help="precision of the replay (default: captured)",
    )
    parsed.add_argument("--trace", metavar="FILE", help="write the trace of the replay to this file")
    parsed.add_argument("--no-trace", action="store_true", help="only compare, without a trace")
    parsed.add_argument("--verbose", action="store_true", help="also show further origins and whole stacks")
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parsed


def bundles_parser() -> argparse.ArgumentParser:
    """Return the options of ``watchstep bundles``."""
    parsed = argparse.ArgumentParser(
        prog="watchstep bundles",
        description="List the bundles of a run, or show what a bundle contains and lacks.",
    )
    parsed.add_argument(
        "bundle", metavar="RUN_OR_BUNDLE", help="a run: its id, PROJECT/ID, folder or URL; or a bundle's file"
    )
    add_store(parsed)
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Replay a bundle.

    Raises:
        ConfigError: an option is invalid, or the program does not fit the bundle.
        NotFoundError, FormatError, StoreError: the bundle cannot be read.
    """
    options = parser().parse_args(arguments)
    bundle = find_bundle(options.bundle, options.store, options.step, options.worker, options.attempt)
    if bundle.document.program.get("framework") == "jax":
        _replay_jax(bundle, options)
    from watchstep.replay import load_step, render_replay, replay, replay_data

    with _running_program(), _process_group():
        step = load_step(options.program)
        result = replay(
            bundle, step, device=options.device, precision=options.precision, traces=not options.no_trace
        )
    result = dataclasses.replace(result, problems=(*_changes(bundle, options.program), *result.problems))
    if options.trace is not None and result.trace is not None:
        from watchstep.trace import write_trace

        write_trace(result.trace, options.trace)
    if options.json:
        sys.stdout.write(f"{escaped_json(json.dumps(replay_data(result), indent=2))}\n")
    else:
        sys.stdout.write(render_replay(result, verbose=options.verbose))
    sys.stdout.flush()
    raise SystemExit(0 if result.is_reproduced else _EXIT_DIFFERENT)


@contextmanager
def _running_program() -> Iterator[None]:
    """End with the exit code of an error if the program raises or exits: the step was not replayed."""
    try:
        yield
    except WatchstepError:
        raise
    except SystemExit as ended:
        sys.stderr.write(f"watchstep: the program ended the replay by sys.exit({ended.code!r})\n")
        raise SystemExit(_EXIT_ERROR) from None
    except Exception:  # noqa: BLE001 - an exception of the program: not a difference
        traceback.print_exc()
        raise SystemExit(_EXIT_ERROR) from None


def _replay_jax(bundle: Bundle, options: argparse.Namespace) -> NoReturn:
    """Evaluate a step of a JAX program, and name its first bad operation."""
    for option in ("device", "trace"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option} does not apply to a bundle of a JAX step", "leave it out")
    if options.precision != "captured":
        raise ConfigError(
            f"--precision {options.precision} does not apply to a bundle of a JAX step", "leave it out"
        )
    from watchstep.jax.replay.step_arguments import JaxStep
    from watchstep.jax.replay.step_replay import replay_jax_step
    from watchstep.replay.replay_step import load_program_step

    with _running_program():
        result = replay_jax_step(bundle, load_program_step(options.program, JaxStep))
    result = dataclasses.replace(result, notes=(*result.notes, *_changes(bundle, options.program)))
    text = f"{escaped_json(json.dumps(result.data(), indent=2))}\n" if options.json else str(result)
    sys.stdout.write(text)
    sys.stdout.flush()
    raise SystemExit(0 if result.fails else _EXIT_DIFFERENT)


def _changes(bundle: Bundle, program: str) -> tuple[str, ...]:
    """Return how a program differs from the one that recorded a bundle, as sentences."""
    place = program.rpartition(":")[0] or program
    return tuple(changes_since(bundle.document.program, Path(place).expanduser()))


def bundles_main(arguments: Sequence[str]) -> NoReturn:
    """List bundles, or show one.

    Raises:
        NotFoundError, FormatError, StoreError: the run or bundle cannot be read.
    """
    options = bundles_parser().parse_args(arguments)
    if Path(options.bundle).is_file():
        data = _bundle_data(open_bundle_file(options.bundle))
        lines = [f"{name}: {_shown(value)}" for name, value in data.items()]
    else:
        keys = bundle_keys(find_run(options.bundle, options.store).store)
        data = {"bundles": [{**vars(key), "key": key.path} for key in keys]}
        lines = [_listed(key) for key in keys] or ["no bundles"]
    if options.json:
        sys.stdout.write(f"{escaped_json(json.dumps(data, indent=2))}\n")
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    raise SystemExit(0)


def add_store(parsed: argparse.ArgumentParser) -> None:
    """Add the option of the store of a run."""
    parsed.add_argument(
        "--store",
        default=os.environ.get(STORE) or _DEFAULT_STORE,
        help=f"store of a run without a folder or URL (default: {STORE}, or the folder {_DEFAULT_STORE})",
    )


def find_bundle(
    place: str, store_url: str, step: int | None, worker: int | None, attempt: str | None
) -> Bundle:
    """Return the bundle of a file, or the one of a run that the options choose.

    Args:
        place: A file, or a run.
        store_url: Store of a run without a folder or URL.
        step: The step; None for the first failing step, or the first step without one.
        worker: The rank; None for that of the environment.
        attempt: The attempt; None for the newest with such a bundle.

    Raises:
        NotFoundError: There is none.
        FormatError: It is damaged.
        StoreError: The store is unreachable.
        ConfigError: The environment has an invalid rank.
    """
    if Path(place).is_file() or place.endswith(".safetensors"):
        return open_bundle_file(place)
    rank = _rank() if worker is None else worker
    run = find_run(place, store_url)
    store = run.store
    keys = [
        key
        for key in bundle_keys(store)
        if key.worker == rank
        and (step is None or key.step == step)
        and (attempt is None or key.attempt == attempt)
    ]
    if not keys:
        raise NotFoundError(
            f"run {place} has no bundle{'' if step is None else f' of step {step}'} of worker {rank}",
            "'watchstep bundles RUN' lists them",
        )
    attempts = {name: number for number, name in enumerate(run.attempts)}
    newest = max(attempts.get(key.attempt, -1) for key in keys)
    chosen = min(
        (key for key in keys if attempts.get(key.attempt, -1) == newest),
        key=lambda key: (key.reason != "gate", key.step),
    )
    return open_bundle(store, chosen.path)


@contextmanager
def _process_group() -> Iterator[None]:
    """Under torchrun, create the process group that the program's model needs."""
    import torch.distributed

    if int(os.environ.get("WORLD_SIZE", "") or "1") <= 1 or torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _rank() -> int:
    text = os.environ.get("RANK", "") or "0"
    if not text.isdecimal():
        raise ConfigError(f"RANK={text!r} is not a number", "unset it, or pass --worker")
    return int(text)


def _bundle_data(bundle: Bundle) -> dict[str, Any]:
    document = bundle.document
    return {
        "run": dict(document.run),
        "step": document.step,
        "reason": document.reason,
        "is_failing": document.is_failing,
        "bytes": bundle.size,
        "micro_batches": len(document.micro_batches),
        "tensors": len(bundle.tensors),
        "optimizers": [each.get("class") for each in document.optimizers if isinstance(each, dict)],
        "objects": sorted(document.objects),
        "loader": None if document.loader is None else dict(document.loader),
        "program": dict(document.program),
        "precision": dict(document.precision),
        "lost": [[lost.path, lost.reason] for lost in document.lost],
        "redacted": list(document.redacted),
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listed(key: BundleKey) -> str:
    return f"step {key.step:>8}  worker {key.worker:>4}  {key.reason:<8} attempt {key.attempt}"
