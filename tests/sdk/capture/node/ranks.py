"""Ranks of one node as processes that take commands on their input; and the objects that they write."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from watchstep.capture.upload.outgoing import blocks_of
from watchstep.format.block import Block
from watchstep.format.layout import SegmentKey
from watchstep.format.segment import decode
from watchstep.store.store import Store

_PROGRAM = """
import os, sys
from watchstep import Bounds, Cadence, CaptureConfig, Collection, Hook

bounds = Bounds(**eval(os.environ["TEST_BOUNDS"]))
options = {}
saves = "TEST_SAVES" in os.environ  # full tensors of each step
if saves:
    options["collections"] = {"losses": Cadence(), "custom": Collection(None, tensors=Cadence())}
hook = Hook(run="r", config=CaptureConfig(bounds=bounds, **options), on_stop="raise")
rank, step = int(os.environ["RANK"]), 0
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "record":
        for _ in range(int(numbers[0])):
            if saves:
                hook.record(a=[float(step), float(rank)])
            hook.log(loss=1000.0 * step + rank)
            hook.step()
            step += 1
    elif word == "bad":
        hook.log(loss=float("nan"))
        hook.step()
        step += 1
    elif word == "wait":  # until so many rows are on the store
        import time
        while hook.health["counts"].get("rows", 0) < int(numbers[0]):
            time.sleep(0.02)
    elif word == "role":
        import time
        role = None
        while role is None:
            role = hook._ending._writer._uploader._role
            time.sleep(0.02)
        print(type(role).__name__, flush=True)
        continue
    elif word == "train":  # at a pace, until it is stopped
        import time
        while True:
            hook.log(loss=1.0)
            hook.step()
            time.sleep(0.01)
    elif word == "fork":
        if os.fork() == 0:
            import signal, time
            os.close(0), os.close(1), os.close(2)
            signal.alarm(30)
            while True:
                time.sleep(1)
    elif word == "close":
        hook.close()
        print(hook.health, flush=True)
        continue
    print("done", flush=True)
"""


_SERVER = """
import json, os, socket, sys
import pyarrow, watchstep.hook, watchstep.store.cloud

link, program = socket.socket(fileno=int(sys.argv[1])), compile(sys.argv[2], "rank", "exec")
while True:
    request, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
    if not request:
        break
    request = json.loads(request)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    else:
        answer = os.fork()
        if not answer:  # it ends as any program does
            link.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(request["environment"])
            exec(program, {"__name__": "__main__"})
            sys.exit()
        for file in files:
            os.close(file)
    link.send(json.dumps(answer).encode())
"""
"""Forks for each rank: to import takes longer than what ranks do."""


class RankServer:
    """The process whose children are ranks. Close it."""

    def __init__(self) -> None:
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-c", _SERVER, str(other.fileno()), _PROGRAM]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()])

    def start(self, environment: Mapping[str, str], files: Sequence[int]) -> int:
        """Start a rank with its input, its output and its errors, and return the id of its process."""
        socket.send_fds(self._link, [json.dumps({"environment": dict(environment)}).encode()], files)
        return self._answer(None)

    def wait(self, pid: int, seconds: float) -> int:
        """Return the exit code of a rank that ends within these seconds."""
        self._link.send(json.dumps({"wait": pid}).encode())
        return self._answer(seconds)

    def close(self) -> None:
        """End it."""
        self._link.close()
        self._process.wait()

    def _answer(self, seconds: float | None) -> int:
        self._link.settimeout(seconds)
        return int(json.loads(self._link.recv(100)))


@functools.cache
def rank_server() -> RankServer:
    """The server that the tests of this process share; `conftest` closes it."""
    return RankServer()


class Rank:
    """One process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        (input_, writes), (answers, output), (said, errors) = (os.pipe() for _ in range(3))
        self.pid = rank_server().start(environment, [input_, output, errors])
        for file in (input_, output, errors):
            os.close(file)
        self._input, self._output, self._errors = open(writes, "w"), open(answers), open(said)  # noqa: PTH123, SIM115
        self._code: int | None = None

    def say(self, words: str) -> None:
        self._input.write(words + "\n")
        self._input.flush()

    def answer(self) -> str:
        line = self._output.readline().strip()
        assert line, self.errors()
        return line

    def errors(self) -> str:
        self.kill()
        return self._errors.read()

    def do(self, words: str) -> str:
        self.say(words)
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, unless it was waited for."""
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Return its exit code."""
        if self._code is None:
            self._code = rank_server().wait(self.pid, seconds)
        return self._code

    def close(self) -> None:
        """End it, and forget what it said."""
        self.kill()
        self.wait(600.0)
        for file in (self._output, self._errors):
            file.close()
        with contextlib.suppress(BrokenPipeError):  # of what it did not read
            self._input.close()


def do_all(ranks: list[Rank], words: str) -> list[str]:
    """Send the command to all ranks, then read all answers."""
    for rank in ranks:
        rank.say(words)
    return [rank.answer() for rank in ranks]


def record(ranks: list[Rank], steps: int, *, total: int | None = None) -> None:
    """Let all ranks record so many steps, and wait until the store has all of their steps."""
    do_all(ranks, f"record {steps}")
    do_all(ranks, f"wait {steps if total is None else total}")


@contextmanager
def node(
    count: int, environment: Mapping[str, str], *, local: int | None = None, **bounds: float
) -> Iterator[list[Rank]]:
    """So many ranks that record."""
    base = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count if local is None else local),
        "WATCHSTEP_ATTEMPT": "a1",
        "TEST_BOUNDS": repr({"flush_seconds": 0.05, "control_seconds": 0.05, **bounds}),
        **environment,
    }
    ranks = [Rank({**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def leader_of(ranks: list[Rank]) -> int:
    """The index of the leader, once one rank leads and the others follow: after a leader's death that takes a moment."""
    deadline = time.monotonic() + 60
    while True:
        roles = do_all(ranks, "role")
        leaders = [place for place, role in enumerate(roles) if role == "Leader"]
        if len(leaders) == 1 and roles.count("Follower") == len(ranks) - 1:
            return leaders[0]
        assert time.monotonic() < deadline, roles


class Written:
    """All segments of a run."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.keys = sorted(SegmentKey.parse(path) for path in objects)
        self.blocks: list[Block] = [decode(objects[key.path], key.path) for key in self.keys]
        self.positions = {key: blocks_of(objects[key.path], key.path) for key in self.keys}
        self.rows: Counter[tuple[int, int, float]] = Counter()
        for block in self.blocks:
            self.rows.update(
                zip(block.worker.tolist(), block.step.tolist(), block.statistics.mean.tolist(), strict=True)
            )

    @classmethod
    def of(cls, store: Store) -> Written:
        run = store.child("default/r")
        return cls({entry.key: run.get(entry.key, limit=1 << 30) for entry in run.entries("stats/")})

    @property
    def writers(self) -> list[str]:
        return sorted({key.writer.writer for key in self.keys})

    def assert_rows_of(self, steps: Mapping[int, int], *, writers: int | None = None) -> None:
        """All rows of the ranks that closed, once; those of others at most once; no number twice, none missing."""
        assert set(self.rows.values()) <= {1}
        for rank, count in steps.items():
            assert sorted(row[1] for row in self.rows if row[0] == rank) == list(range(count))
        assert writers in (None, len(self.writers))
        self.assert_contiguous()

    def assert_contiguous(self) -> None:
        """The numbers of each writer have no gap and no duplicate."""
        by_writer: dict[str, list[int]] = {}
        for key in self.keys:
            by_writer.setdefault(key.writer.writer, []).append(key.seq)
        assert by_writer == {writer: list(range(len(seqs))) for writer, seqs in by_writer.items()}

    def assert_whole(self, steps: Mapping[int, int], *, writers: int | None = None) -> None:
        """Each row of so many steps of each rank is there once, and no other, by so many writers."""
        wanted = {
            (rank, step, 1000.0 * step + rank) for rank, count in steps.items() for step in range(count)
        }
        assert set(self.rows) == wanted
        assert set(self.rows.values()) <= {1}
        assert writers in (None, len(self.writers))
        self.assert_contiguous()


def meeting_files(temporary: Path) -> list[str]:
    """What is left of meetings in a temporary folder."""
    return sorted(
        str(file.relative_to(temporary))
        for file in temporary.glob("watchstep-*/**/*")
        if file.is_file() or file.is_socket()
    )
