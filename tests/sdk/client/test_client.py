"""The client against a service over a real socket."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import watchstep
from tests.services.api.serving import serving
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, nan_from
from watchstep.client import Client
from watchstep.errors import ConfigError, NotFoundError, ServiceError
from watchstep.format.layout import SnapshotKey
from watchstep.platform.transport import ServiceRefusedError
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_services.auth import create_token
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """A run with an alert and a stop request, and a healthy run."""
    from safetensors.numpy import save

    folder = tmp_path_factory.mktemp("client")
    (folder / "store").mkdir()
    store = Store.open(folder / "store")
    database = open_database(f"sqlite:///{folder / 'service.sqlite'}")
    upgrade(database)
    driven = Driven(make_service(database, store))
    for name, bad in (("run-1", 5), ("run-2", 10**6)):
        recording = Recording(store, name).begin()
        run_id = driven.register(name)
        driven.announce(run_id, recording.write(0, 0, 49, nan_from(bad)))
        for collection in ("", "weights"):
            values = np.arange(6.0).reshape(2, 3) + len(collection)
            recording.store.put(SnapshotKey("a1", 0, 5, "train", collection).path, save({"w": values}))
        driven.settle(run_id)
    yield driven
    database.close()


@pytest.fixture(scope="module")
def url(driven: Driven) -> Iterator[str]:
    with serving(driven.service) as url:
        yield url


@pytest.fixture(scope="module")
def client(driven: Driven, url: str) -> Client:
    return watchstep.Client(url, create_token(driven.service.database, "operator"), "vision")


def test_tokens_of_a_run(driven: Driven, url: str) -> None:
    admin = Client(url, create_token(driven.service.database, "admin"), "vision")
    token = admin.create_token("run-1", "its job", 3600)
    (listed,) = admin.tokens("run-1")
    assert (listed.name, listed.state, listed.id in token) == ("its job", "active", True)
    assert token not in repr(listed)
    assert listed.expires_ns - listed.created_ns == 3600 * 10**9
    assert list(admin.tokens("run-2")) == []
    with pytest.raises(ServiceRefusedError, match="may not operate"):
        Client(url, token, "vision").create_token("run-1")
    with pytest.raises(NotFoundError):
        admin.revoke_token("run-2", listed.id)
    admin.revoke_token("run-1", listed.id)
    assert [remaining.state for remaining in admin.tokens("run-1")] == ["revoked"]


def test_runs_and_what_is_known_of_them(client: Client) -> None:
    assert [run.run for run in client.runs()] == ["run-2", "run-1"]
    assert [run.run for run in client.runs(alerts=["firing"])] == ["run-1"]
    run = client.run("run-1")
    assert (run.info.project, run.info.last_step, run.info.alerts["firing"]) == ("vision", 49, 1)
    assert (
        {rule.name for rule in run.rules}
        == {rule.name for rule in client.rules("run-1")}
        >= {"non_finite_values"}
    )
    (alert,) = client.alerts(phases=["firing"])
    assert (alert.run, alert.name, alert.severity) == ("run-1", "non_finite_values", "critical")
    assert list(client.alerts("run-2")) == []
    assert [action.kind for action in client.actions("run-1")] == ["stop"]
    assert "io.watchstep.alert.firing" in [event.type for event in client.events("run-1")]


def test_every_page_is_fetched(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep.client.client._PAGE", 1)
    assert [run.run for run in client.runs()] == ["run-2", "run-1"]


def test_queries_give_arrays_and_tables(client: Client, driven: Driven) -> None:
    run = open_run(f"{Store.open(driven.service.settings.store).location}/vision/run-2")
    tensor = run.tensors("gradients")[0]
    assert tensor in [entry["name"] for entry in client.tensors("run-2", "gradients")]
    table = client.series("run-2", tensor, "l2")
    assert table["mean"].to_pylist() == run.series(tensor, "l2")["l2"].to_pylist()
    assert len(client.series("run-2", tensor, "l2", points=7)) <= 7
    heatmap, expected = (
        client.heatmap("run-2", "gradients", "l2", points=10),
        run.heatmap("gradients", "l2", 10),
    )
    assert heatmap.tensors == expected.tensors
    np.testing.assert_array_equal(heatmap.edges, expected.edges)
    np.testing.assert_array_equal(heatmap.values, expected.values)
    histogram, expected_histogram = client.histogram("run-2", tensor, points=5), run.histogram(tensor, 5)
    np.testing.assert_array_equal(histogram.counts, expected_histogram.counts)
    counted = client.sql("run-2", "SELECT tensor, count(*) AS n FROM statistics GROUP BY tensor")
    assert set(counted["n"].to_pylist()) == {50}
    snapshot, weights = client.snapshots("run-2")
    assert (snapshot.collection, weights.collection) == ("", "weights")
    assert list(client.snapshots("run-2", "weights")) == [weights]
    assert list(client.snapshots("run-2", "")) == [snapshot]
    for saved, first in ((snapshot, 0), (weights, 7)):
        downloaded = client.snapshot_tensor("run-2", saved, "w")
        assert downloaded.dtype == "F64"
        np.testing.assert_array_equal(downloaded.values, np.arange(6.0).reshape(2, 3) + first)


def test_pages_are_fetched_in_one_request_each(client: Client) -> None:
    overview = client.overview("run-1", points=10)
    assert len(overview["grid"]["edges"]) == 11
    fingerprint = next(lane["fingerprint"] for lane in overview["lanes"] if lane["fingerprint"])
    page = client.alert_page("run-1", fingerprint, before=5)
    assert page["finding"]["step"] == 5
    compared = client.comparison(["run-1", "run-2"], ["loss"], points=5)
    assert [line["run"] for line in compared["series"][0]["lines"]] == ["run-1", "run-2"]
    assert compared["divergences"][0]["first"]["step"] == 5


def test_all_tensors_of_a_snapshot_are_listed(
    client: Client, driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import save

    values = {f"t{n}": np.full(2, n, np.float32) for n in range(7)}
    key = SnapshotKey("a1", 3, 9, "train", "inputs")
    store = Store.open(driven.service.settings.store)
    Recording(store, "run-1").store.put(key.path, save(values))
    (info,) = client.snapshots("run-1", "inputs")
    monkeypatch.setattr("watchstep.client.client._LARGE_PAGE", 3)
    listed = list(client.snapshot_tensors("run-1", info))
    assert sorted((entry["name"], *entry["shape"]) for entry in listed) == [
        (name, 2) for name in sorted(values)
    ]


def test_rules_are_put_and_removed(client: Client) -> None:
    assert client.put_rule("spike", {"rule": "loss_spike"}, "run-2")["rule"] == "loss_spike"
    assert "spike" in {rule.name for rule in client.rules("run-2")}
    client.remove_rule("spike", "run-2")
    assert "spike" not in {rule.name for rule in client.rules("run-2")}
    client.put_rule("spike", {"rule": "loss_spike"})
    client.remove_rule("spike")


def test_events_are_followed(client: Client) -> None:
    so_far = [event.id for event in client.events("run-2")]
    seen: list[str] = []
    done = threading.Event()

    def follow() -> None:
        for event in client.follow("run-2", after=0):
            seen.append(event.id)
            if event.type == "io.watchstep.stop.requested":
                done.set()
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert client.stop("run-2", "enough").accepted
    assert not client.stop("run-2").accepted
    assert done.wait(60)
    assert seen == [event.id for event in client.events("run-2")][: len(seen)]
    assert seen[: len(so_far)] == so_far


def test_what_is_refused_states_why(client: Client, url: str, driven: Driven) -> None:
    with pytest.raises(NotFoundError, match="vision/none"):
        client.run("none")
    with pytest.raises(ServiceRefusedError, match="nothing") as refused:
        client.put_rule("x", {"rule": "nothing"}, "run-1")
    assert (refused.value.status, refused.value.type) == (422, "urn:watchstep:problem:invalid")
    with pytest.raises(ServiceError, match="token is missing"):
        list(Client(url, "ws_wrong", "vision").runs())
    viewer = Client(url, create_token(driven.service.database, "viewer"), "vision")
    with pytest.raises(ServiceError, match="may not"):
        viewer.stop("run-1")
    with pytest.raises(ServiceRefusedError):
        next(Client(url, "ws_wrong", "vision").follow())
    with pytest.raises(ServiceError, match="does not respond"):
        Client("http://127.0.0.1:1", "x").run("x")
    with pytest.raises(ConfigError):
        Client("ftp://x")


def test_the_command_line_over_it(driven: Driven, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from watchstep_services.cli.main import app

    monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(driven.service.database, "operator"))

    def output_of(*words: str) -> str:
        done = CliRunner().invoke(app, ["runs", *words, "--service", url])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    assert "run-1" in output_of("list", "--project", "vision")
    assert "non_finite_values" in output_of("alerts", "vision/run-1")
    assert "stop requested" in output_of("events", "vision/run-1")
    assert '"specversion"' in output_of("events", "vision/", "--json")
    assert "stop" in output_of("actions", "vision/run-1")
    assert "a stop was already requested" in output_of("stop", "vision/run-1")


def test_importing_it_loads_no_framework() -> None:
    program = "import sys, watchstep; watchstep.Client; assert not {'httpx', 'torch', 'duckdb', 'pandas'} & set(sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
