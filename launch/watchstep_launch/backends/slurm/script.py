"""The batch script of a job: it sets the environment and starts the command under ``srun``, once for each task."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from watchstep.errors import ConfigError
from watchstep_launch.backend import Launch

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_HEAD = """\
#!/bin/bash
# Written by Watchstep.
asked=
trap 'asked=1' TERM
"""

_FOR_ALL = """\
export WATCHSTEP_RESTARTS="${SLURM_RESTART_COUNT:-0}"
# srun takes these from its own variables, not from the job's.
unset SLURM_EXPORT_ENV
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
"""

_RANKS = """\
export MASTER_ADDR="${MASTER_ADDR:-$(hostname)}"
if [ -z "${MASTER_PORT:-}" ]; then
    # Below what the kernel gives to connections, and not where somebody listens.
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
    export MASTER_PORT
fi
"""

_OTHERS_SECONDS = 300
"""So long the other tasks may go on once the first has ended: they may wait for it for ever, or save a checkpoint."""

_TASK_RANKS = (
    "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={local}; "
)
_AGENT = "export PET_NNODES=$SLURM_NTASKS PET_NODE_RANK=$SLURM_PROCID PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT; "

_TAIL = """\
[ -z "$asked" ] || exit 143
{command}
code=$?
exit "$code"
"""


def batch_script(launch: Launch, tasks: int, tasks_per_node: int) -> str:
    """The script. Arguments and values reach the command as they are.

    With several tasks each finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``, as ``torch.distributed`` reads them; with one to a node ``torchrun`` finds its nodes by the same.
    ``MASTER_ADDR`` is the first node's hostname and the port, which follows from the job's id, is free there, unless
    the environment has them.

    Raises:
        ConfigError: something of it no program can be given.
    """
    parts = [_HEAD, _exports(launch.environment), _FOR_ALL]
    ranks = ""
    if tasks > 1:
        parts.append(_RANKS)
        ranks = _TASK_RANKS.format(local=tasks_per_node) + (_AGENT if tasks_per_node == 1 else "")
    task = ("bash", "-c", f'{ranks}exec "$@"', "watchstep-task", *launch.command)
    for text in launch.command:
        _check("an argument", text)
    together = (f"--wait={_OTHERS_SECONDS}",) if tasks > 1 else ()
    srun = ("srun", "--input=none", "--export=ALL", *together, *task)
    parts.append(_TAIL.format(command=shlex.join(srun)))
    return "".join(parts)


def check_environment(environment: Mapping[str, str]) -> None:
    """See that each variable can be set in a job.

    Raises:
        ConfigError: one cannot.
    """
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"environment variable {name!r}: Slurm's jobs cannot have it", "use letters, digits and '_'"
            )
        _check(f"environment variable {name}", value)


def _exports(environment: Mapping[str, str]) -> str:
    check_environment(environment)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def _check(what: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{what} has a zero byte: {text[:80]!r}", "leave it out")
