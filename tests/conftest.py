"""Shared fixtures: stores to write to, and examples of laws that do not depend on chance."""

from __future__ import annotations

import gc
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import warmed
from watchstep.store.store import Store

# Triton decides whether it compiles or interprets when anything imports it, and several libraries do. This is decided without
# PyTorch, whose import takes a second.
if find_spec("torch") is None or version("torch").endswith("+cpu") or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# PyTorch reads this when it is imported. Of several threads most wait, and OpenMP's threads wait busily: on shared cores, that took
# ten times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How many examples a law is held to, where it does not say so itself; `tests.suite` gives each tier its number. Hypothesis also
# draws constants from the modules that are imported, so that a law that runs alone can have other examples than in its suite.
settings.register_profile(
    "repeatable",
    max_examples=int(os.environ.get("WATCHSTEP_LAW_EXAMPLES", "40")),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


def _cpu_seconds() -> tuple[float, float]:
    """Processor time of this process, and of the programs that it waited for."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system + warmed.cpu_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note where a test's processor time begins, and keep what earlier files left from the garbage collector.

    The heap of a process that has run the tests of a hundred files takes two seconds to traverse.
    """
    item.stash[_CPU_START] = _cpu_seconds()
    if item.path != item.session.stash.get(_FILE, None):
        item.session.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Add a test's name and processor time to its report, for `tests.suite`."""
    try:
        return (yield)
    finally:
        before = item.stash[_CPU_START]
        own, children = (now - then for now, then in zip(_cpu_seconds(), before, strict=True))
        item.user_properties += [
            ("nodeid", item.nodeid),
            ("cpu_seconds", f"{own + children:.3f}"),
            ("children_seconds", f"{children:.3f}"),
        ]


_CPU_START = pytest.StashKey[tuple[float, float]]()
_FILE = pytest.StashKey[Path]()


@pytest.fixture(autouse=True, scope="session")
def _warmed_process() -> Iterator[None]:
    yield
    warmed.end()


@pytest.fixture(autouse=True)
def spill_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's recorders put what they cannot upload."""
    root = tmp_path_factory.mktemp("spill")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("WATCHSTEP_SPILL", str(root))
    monkeypatch.setenv("WATCHSTEP_JOBS", str(root / "jobs"))
    monkeypatch.setenv("WATCHSTEP_IDLE_SECONDS", "5")
    return root


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """A store in an empty local folder."""
    return Store.open(tmp_path / "store", create=True)


@dataclass(frozen=True)
class S3:
    """An S3 server on this machine, which forgets everything between tests."""

    endpoint: str

    def post(self, path: str, body: bytes = b"") -> None:
        """Call moto's own interface."""
        call = urllib.request.Request(
            f"{self.endpoint}/moto-api/{path}", body, {"Content-Type": "text/plain"}, method="POST"
        )
        with urllib.request.urlopen(call):
            pass

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        call = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(call):
            pass

    def require_known_keys(self) -> None:
        """From now on, refuse access keys that no user of the account has."""
        self.post("reset-auth", b"0")


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def s3(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty S3 server; the environment leads every client to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = S3(_s3_server)
    server.post("reset")
    yield server
    server.post("reset-auth", b"Infinity")


@pytest.fixture
def s3_store(s3: S3) -> Store:
    """A store below a prefix of an S3 bucket."""
    s3.make_bucket("runs")
    return Store.open("s3://runs/some/prefix")


@pytest.fixture
def store(folder_store: Store) -> Store:
    """A store for what holds of every store. Providers' servers are in tests/stores."""
    return folder_store
