"""A real Slurm: one controller and two nodes on this machine, everything in a folder of its own.

From Debian's packages slurm-wlm and munge, which ``.ci/run`` installs. Nobody's own cluster is touched: commands find
this one by ``SLURM_CONF``.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.services.jobs import eventually
from tests.services.redis import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "srun")
SECONDS = 60.0

_CONFIGURATION = """\
ClusterName=watchstep-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=2
FirstJobId={first}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=16 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=16 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can be one."""
    lacking = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    return f"NO SLURM HERE ({', '.join(lacking)} missing): apt-get install slurm-wlm munge" if lacking else ""


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        """What SLURM_CONF names."""
        return self.folder / "slurm.conf"

    def command(self, *words: str) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(
            words, env=self._environment(), capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return done.stdout

    def start_controller(self, *, forget: bool = False, idle: bool = True) -> None:
        """Start the controller, with all that it knew or with nothing, and wait until it answers for its nodes."""
        if forget:  # with -c it would still count on from the last job's id
            shutil.rmtree(self.folder / "state")
            (self.folder / "state").mkdir(mode=0o700)
        self._start("slurmctld", "slurmctld", "-D")
        wanted = {"idle"} if idle else {"idle", "allocated", "mixed"}
        eventually(lambda: self._states() <= wanted, SECONDS)

    def stop_controller(self) -> None:
        """Stop the controller; jobs go on."""
        self._stop("slurmctld")

    def start(self) -> None:
        """Start everything."""
        for name in ("munge", "state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(mode=0o700)
        values = {
            "folder": self.folder, "user": getpass.getuser(), "host": socket.gethostname().partition(".")[0],
            "controller": free_port(), "one": free_port(), "two": free_port(),
            "first": 1 + secrets.randbelow(40_000),
        }  # fmt: skip
        self.configuration.write_text(_CONFIGURATION.format(**values))
        munge = self.folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        places = (f"--{name}={munge / place}" for name, place in (
            ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
        ))  # fmt: skip
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", *places)
        eventually((munge / "socket").exists, SECONDS)
        for node in ("n1", "n2"):
            self._start(node, "slurmd", "-D", "-N", node)
        self.start_controller(forget=True)

    def close(self) -> None:
        """End all jobs and all of its processes."""
        try:
            if "slurmctld" not in self._daemons:
                self.start_controller(idle=False)
            self.command("scancel", f"--user={getpass.getuser()}")
            eventually(lambda: not self.command("squeue", "--noheader"), SECONDS)
        finally:
            for name in reversed(list(self._daemons)):
                self._stop(name)

    def _states(self) -> set[str]:
        try:
            return set(self.command("sinfo", "--noheader", "-N", "--format=%T").split())
        except subprocess.CalledProcessError:
            return {"no answer"}

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.output").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self._environment(), stdout=output, stderr=output, start_new_session=True
            )

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**kept, "PATH": _path(), "SLURM_CONF": str(self.configuration)}


@contextmanager
def running_slurm() -> Iterator[SlurmCluster]:
    """Start a cluster, and leave nothing of it behind."""
    # Not pytest's folder: a socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="ws-slurm-") as folder:
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
