"""Programs start, train and are registered in the end, whatever the service and the store do while they are launched."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.store.dripping_server import dripping
from tests.sdk.store.faulty_s3 import FaultyS3
from tests.services.jobs import eventually
from tests.services.redis import free_port
from watchstep import open_run
from watchstep.client import Client
from watchstep.errors import NotFoundError, ServiceError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.platform.process import ProcessIdentity
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

pytestmark = pytest.mark.release

WATCHSTEP = Path(sys.executable).with_name("watchstep")
SECONDS = 60.0

PROGRAM = """
import json, pathlib, sys, time
import watchstep
hook = watchstep.Hook(on_stop={on_stop!r})
steps, done = int(sys.argv[1]), pathlib.Path(sys.argv[2])
while hook._recorder.step < steps or not done.exists():
    hook.log(loss=1.0)
    hook.step()
    time.sleep(0.01)
    said = pathlib.Path(sys.argv[2] + ".saying")
    said.write_text(json.dumps(hook.health))
    said.replace(sys.argv[2] + ".health")
hook.close()
"""
"""Trains for so many steps, and until a file is there; says how it is, beside that."""

RULES = "rules:\n  - rule: loss_spike\n    name: mine\n    actions: [stop]\n"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))


class Launched:
    """A program under ``watchstep run``."""

    def __init__(
        self, folder: Path, *options: str | Path, steps: int = 5, on_stop: str | None = None, run: str = "r"
    ) -> None:
        self.run = run
        self.done = folder / f"{run}.done"
        program = folder / "train.py"
        program.write_text(PROGRAM.replace("{on_stop!r}", repr(on_stop)))
        self.process = subprocess.Popen(
            [WATCHSTEP, "run", "--run", run, *options, "--", sys.executable, program, str(steps), self.done],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def health(self) -> dict[str, Any]:
        """As the program said last; empty before it said anything."""
        try:
            health: dict[str, Any] = json.loads(Path(f"{self.done}.health").read_text())
        except FileNotFoundError:
            return {}
        return health

    def end(self) -> tuple[int, str]:
        """Let it end; its code, and what it said."""
        self.done.touch()
        _, said = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said


@dataclass(frozen=True)
class Served:
    """A service in a process of its own, which is not the parent of what it may stop."""

    url: str
    operator_token: str


@contextmanager
def service(home: Path, store: Path, port: int = 0) -> Iterator[Served]:
    process = subprocess.Popen(
        [WATCHSTEP, "serve", "--store", store, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually((home / "service.json").exists, SECONDS)
        note = json.loads((home / "service.json").read_text())
        yield Served(note["url"], note["operator_token"])
    finally:
        process.terminate()
        process.wait(SECONDS)


def run_of(found: Served, run: str = "r") -> dict[str, Any]:
    """A run as its service knows it: rules, and the process that is its job; empty where it does not."""
    try:
        state = Client(found.url, found.operator_token).run(run)
    except NotFoundError:
        return {}
    return {"rules": {rule.name for rule in state.rules}, "job": state.job and state.job["id"]}


def is_registered(found: Served, launched: Launched) -> bool:
    state = run_of(found, launched.run)
    return bool(state) and state["job"] == str(launched.process.pid) and "mine" in state["rules"]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def test_a_service_that_starts_later_is_told_of_the_job_and_its_rules(tmp_path: Path, rules: Path) -> None:
    launched = Launched(tmp_path, "--store", tmp_path / "store", "--rules", rules)
    eventually(lambda: launched.health.get("counts", {}).get("rows", 0) > 0, SECONDS)
    assert "does not know this run's job" in launched.health["notes"]["registration"]
    with service(tmp_path / "home", tmp_path / "store") as found:
        eventually(lambda: is_registered(found, launched), SECONDS)
        eventually(lambda: "registration" not in launched.health["notes"], SECONDS)
        code, said = launched.end()
    assert code == 0, said
    assert "no service watches the store" in said


def test_a_named_service_that_does_not_answer_is_told_once_it_does(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, store = free_port(), tmp_path / "store"
    settings = load_settings(home=tmp_path / "home", store=str(store))
    with EmbeddedService(settings) as first:
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(first.database, "operator"))
    launched = Launched(tmp_path, "--store", store, "--rules", rules, "--service", f"http://127.0.0.1:{port}")
    eventually(lambda: "registration" in launched.health.get("faults", {}), SECONDS)
    assert "does not respond" in launched.health["faults"]["registration"]
    with service(tmp_path / "home", store, port) as second:
        eventually(lambda: is_registered(second, launched), SECONDS)
        eventually(lambda: "registration" not in launched.health["notes"], SECONDS)
        code, said = launched.end()
    assert code == 0, said
    assert said.count("The program starts. The recorder registers the run when the service answers") == 1


def test_a_service_that_is_started_again_is_found_again(tmp_path: Path, rules: Path) -> None:
    store = tmp_path / "store"
    with service(tmp_path / "home", store) as first:
        launched = Launched(tmp_path, "--store", store, "--rules", rules)
        eventually(lambda: is_registered(first, launched), SECONDS)
        eventually(lambda: "tombstone" not in launched.health.get("notes", {"tombstone": ""}), SECONDS)
    with service(tmp_path / "home", store) as second:
        assert second.operator_token != first.operator_token
        Client(second.url, second.operator_token).request_snapshot("r")
        assert is_registered(second, launched)
        code, said = launched.end()
    assert code == 0, said


@pytest.mark.parametrize("note", ["reused", "of another kind"])
def test_a_stale_note_keeps_no_program_from_starting(tmp_path: Path, note: str) -> None:
    home = tmp_path / "store" / ".watchstep"
    home.mkdir(parents=True)
    process = asdict(replace(ProcessIdentity.of(os.getpid()), start_ticks=1))
    data = {
        "url": "http://127.0.0.1:9", "operator_token": "o", "recorder_token": "r",
        "stores": [str(tmp_path / "store")], "process": process if note == "reused" else 7,
    }  # fmt: skip
    (home / "service.json").write_text(json.dumps(data))
    code, said = Launched(tmp_path, "--store", tmp_path / "store").end()
    assert code == 0, said
    assert "no service watches the store" in said
    assert ("note of a service is invalid" in said) == (note != "reused")
    assert open_run(tmp_path / "store/default/r").steps()


@pytest.mark.parametrize("way", ["dots", "link", "space"])
def test_a_store_is_the_same_by_every_path(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store = tmp_path / "a b"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(store)
    with service(tmp_path / "home", store) as found:
        path = {"dots": "../a b", "link": str(tmp_path / "link"), "space": str(store)}[way]
        launched = Launched(tmp_path, "--store", path, "--rules", rules)
        eventually(lambda: is_registered(found, launched), SECONDS)
        code, said = launched.end()
    assert code == 0, said
    assert "no service watches the store" not in said


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, *, listening: bool) -> Iterator[FaultyS3]:
    with FaultyS3().serving(listening=listening) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("on_stop", ["raise", "ignore"])
def test_a_tombstone_that_could_not_be_seen_at_the_launch_stops_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stop: str
) -> None:
    with bucket(monkeypatch, listening=False) as server:
        options = ("--store", "s3://bucket/runs", "--on-stop", on_stop)
        launched = Launched(tmp_path, *options)
        eventually(lambda: "unverified" in launched.health.get("notes", {}).get("tombstone", ""), SECONDS)
        stopped = ControlDocument().with_stop(StopRequest("an-earlier-one", 3, "NaN at step 2"))
        server.objects["/bucket/runs/default/r/control.json"] = stopped.encode()
        server.listen()
        _, said = launched.process.communicate(timeout=SECONDS)
    assert launched.process.returncode == 86, said
    assert "this run was stopped earlier: NaN at step 2" in said
    assert "good is checked then" in said


def test_what_no_store_takes_at_the_launch_is_uploaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Path
) -> None:
    with bucket(monkeypatch, listening=False) as server:
        launched = Launched(tmp_path, "--store", "s3://bucket/runs", "--rules", rules)
        eventually(lambda: bool(launched.health), SECONDS)
        server.listen()
        eventually(lambda: launched.health["counts"].get("rows", 0) > 0, SECONDS)
        eventually(lambda: "tombstone" not in launched.health["notes"], SECONDS)
        code, said = launched.end()
        assert code == 0, said
        document = json.loads(server.objects["/bucket/runs/default/r/run.json"])
    assert [rule["name"] for rule in document["rules"]] == ["mine"]


def test_a_store_that_never_answers_holds_no_program_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket(monkeypatch, listening=True) as server:
        server.fault = "stall"
        done = subprocess.run(
            [
                sys.executable, "-c",
                ("import sys; from watchstep.wrapper import run_command; run_command._STORE_SECONDS = 0.5; "
                 "run_command.main(['--store', 's3://bucket/runs', '--', sys.executable, '-S', '-c', 'raise SystemExit(7)'])"),
            ],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        server.released.set()
    assert done.returncode == 7
    assert "no answer within 0 s" in done.stderr


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A service that answers every POST with the same body; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "body", [b'{"status":"ok"}', b'{"control":null}', b"7", b"", b"[" * 2000 + b"]" * 2000, b"[" * 100_000]
)
def test_a_service_that_answers_with_something_else_keeps_no_program_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    with answering(body) as url:
        options = ("--store", tmp_path / "store", "--service", url)
        code, said = Launched(tmp_path, *options).end()
        assert code == 0, said
        assert "The program starts. The recorder registers the run" in said
        assert "\n  hint: " in said
        code, said = Launched(tmp_path, *options, "--require-service", run="required").end()
    assert code == 2, said
    assert "The program starts" not in said
    assert "Traceback" not in said


def test_a_service_whose_answer_never_ends_keeps_no_program_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    with dripping("body") as url:
        launched = Launched(tmp_path, "--store", tmp_path / "store", "--service", url)
        eventually(lambda: launched.health.get("counts", {}).get("rows", 0) > 0, SECONDS)
        code, said = launched.end()
    assert code == 0, said
    assert "The program starts. The recorder registers the run" in said


class Restarting:
    """A real service on a store that is ended and started again, by turns gently and not."""

    def __init__(self, store: Path, random_numbers: random.Random) -> None:
        self._store = store
        self._random = random_numbers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.starts = 0

    def __enter__(self) -> Restarting:  # noqa: PYI034 - Self comes with Python 3.11
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.is_set():
            process = self.start()
            self._over.wait(self._random.uniform(0.5, 3.0))
            process.send_signal(self._random.choice([signal.SIGTERM, signal.SIGKILL]))
            process.wait(SECONDS)
            self._over.wait(self._random.uniform(0.0, 0.5))

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(
            [WATCHSTEP, "serve", "--store", self._store, "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def test_every_launch_trains_to_its_end_while_the_service_restarts(tmp_path: Path, rules: Path) -> None:
    store, numbers = tmp_path / "store", random.Random(5)
    names = [f"r{number}" for number in range(12)]
    with Restarting(store, numbers) as restarting:
        for start in range(0, len(names), 4):
            together = [
                Launched(
                    tmp_path, "--store", store, "--rules", rules, run=name, steps=numbers.randrange(50, 400)
                )
                for name in names[start : start + 4]
            ]
            for launched in together:
                code, said = launched.end()
                assert code == 0, said
                assert "Traceback" not in said
    assert restarting.starts > 2
    for name in names:
        (end,) = open_run(store / "default" / name).ends()
        assert end.state == "completed"
    process = restarting.start()
    try:
        eventually(lambda: states(tmp_path / "home", names) == {"completed"}, SECONDS)
    finally:
        process.terminate()
        process.wait(SECONDS)


def states(home: Path, names: list[str]) -> set[str]:
    """The states of runs, as the service knows them; also "unknown"."""
    try:
        note = json.loads((home / "service.json").read_text())
        runs = {run.run: run.state for run in Client(note["url"], note["operator_token"]).runs()}
    except (OSError, ValueError, ServiceError):
        return {"unknown"}
    return {runs.get(name, "unknown") for name in names}
