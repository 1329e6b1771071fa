"""States and logs of jobs, and where the backend itself runs in a pod."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.config import incluster_config

from tests.launch.backends.kubernetes.double import TOKEN, running_double
from watchstep_launch.backend import BackendDownError, JobStatus
from watchstep_launch.backends.kubernetes import states as kubernetes_logs
from watchstep_launch.backends.kubernetes.backend import Kubernetes
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError
from watchstep_launch.backends.kubernetes.states import END_REQUESTED, read_logs, status_of

Object = dict[str, Any]


def job(condition: str = "", reason: str = "", *, asked: str = "", suspend: bool = False) -> Object:
    conditions = [{"type": condition, "status": "True", "reason": reason, "message": ""}] if condition else []
    annotations = {"annotations": {END_REQUESTED: asked}} if asked else {}
    return {
        "metadata": {"name": "j", **annotations},
        "spec": {"suspend": suspend},
        "status": {"conditions": conditions},
    }


def pod(
    phase: str,
    code: int | None = None,
    *,
    number: int = 0,
    index: int = 0,
    waiting: tuple[str, str] | None = None,
    unscheduled: str = "",
    deleted: bool = False,
) -> Object:
    state: Object = {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": "Error"}}
    elif waiting is not None:
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    elif phase == "Running":
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    metadata: Object = {
        "name": f"j-{index}-{number}",
        "creationTimestamp": f"2026-01-01T00:00:{number:02d}Z",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "ownerReferences": [{"uid": "job"}],
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unscheduled}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "main"}], "nodeName": "" if unscheduled else "node-1"},
        "status": {
            "phase": phase,
            "conditions": [said] if unscheduled else [],
            "containerStatuses": [{"name": "main", "state": state}] if state else [],
        },
    }


@pytest.mark.parametrize(
    ("held", "pods", "status"),
    [
        (job(), [], JobStatus("queued", detail="no pod exists yet")),
        (job(suspend=True), [], JobStatus("queued", detail="suspended: waiting for admission")),
        (job(), [pod("Pending")], JobStatus("queued", detail="Pending on node-1")),
        (
            job(),
            [pod("Pending", waiting=("ImagePullBackOff", 'Back-off pulling image "x"'))],
            JobStatus("queued", detail='ImagePullBackOff: Back-off pulling image "x"'),
        ),
        (
            job(),
            [pod("Pending", waiting=("ContainerCreating", ""))],
            JobStatus("queued", detail="Pending on node-1"),
        ),
        (
            job(),
            [pod("Pending", unscheduled="0/3 nodes are available")],
            JobStatus("queued", detail="Unschedulable: 0/3 nodes are available"),
        ),
        (job(), [pod("Running")], JobStatus("running", detail="Running on node-1")),
        (job(), [pod("Running", deleted=True)], JobStatus("running", detail="is being ended")),
        (job(), [pod("Failed", 1)], JobStatus("running", detail="waiting for a restart")),
        (
            job(),
            [pod("Failed", 1), pod("Pending", number=1)],
            JobStatus("running", detail="Pending on node-1"),
        ),
        (
            job("Complete", "CompletionsReached"),
            [pod("Succeeded", 0)],
            JobStatus("ended", 0, "CompletionsReached"),
        ),
        (job("Complete", "Done", asked="stop"), [pod("Succeeded", 0)], JobStatus("ended", 0, "Done")),
        (
            job("Failed", "BackoffLimitExceeded"),
            [pod("Failed", 3)],
            JobStatus("ended", 3, "BackoffLimitExceeded"),
        ),
        (
            job("Failed", "PodFailurePolicy"),
            [pod("Failed", 1), pod("Failed", 87, number=1)],
            JobStatus("ended", 87, "PodFailurePolicy"),
        ),
        (
            job("Failed", "BackoffLimitExceeded"),
            [pod("Failed", 137)],
            JobStatus("ended", -9, "BackoffLimitExceeded"),
        ),
        (job("Failed", "Evicted"), [], JobStatus("ended", None, "Evicted")),
        (
            job("Failed", "DeadlineExceeded", asked="kill"),
            [],
            JobStatus("cancelled", None, "DeadlineExceeded"),
        ),
        (
            job("Failed", "BackoffLimitExceeded", asked="stop"),
            [pod("Failed", 5)],
            JobStatus("cancelled", 5, "BackoffLimitExceeded"),
        ),
        (
            job("Failed", "FailedJobs"),
            [pod("Running"), pod("Failed", 1, index=1)],
            JobStatus("running", None, "Running on node-1"),
        ),
        (
            job("Failed", "FailedJobs"),
            [pod("Succeeded", 0), pod("Failed", 4, index=1)],
            JobStatus("ended", 4, "FailedJobs"),
        ),
        (
            job("Suspended", "Suspended", suspend=True, asked="stop"),
            [],
            JobStatus("cancelled", None, "Suspended"),
        ),
        (
            job("Suspended", "Suspended", suspend=True),
            [],
            JobStatus("queued", None, "suspended: waiting for admission"),
        ),
        (
            job("Suspended", "Suspended", suspend=True, asked="stop"),
            [pod("Running", deleted=True)],
            JobStatus("running", None, "is being ended"),
        ),
    ],
)
def test_how_a_job_is(held: Object, pods: list[Object], status: JobStatus) -> None:
    assert status_of(held, pods) == status


def test_long_words_of_the_cluster_are_cut() -> None:
    told = status_of(job(), [pod("Pending", unscheduled="nodes\n" * 400)]).detail
    assert told.startswith("Unschedulable: nodes nodes")
    assert len(told) <= 300


class Kept:
    """Output as a kubelet keeps it: each line with its time; asked for from a second on, it gives that second whole."""

    def __init__(self, logs: dict[str, list[tuple[str, bytes]]], piece: int = 7) -> None:
        self.logs = logs
        self.piece = piece
        self.gone: set[str] = set()

    @contextmanager
    def stream(self, path: str, **query: str) -> Iterator[Iterator[bytes]]:
        name = path.split("/")[-2]
        if name in self.gone:
            raise KubernetesRefusedError(404, "NotFound", "gone")
        since = query.get("sinceTime", "")[:19]
        data = b"".join(time.encode() + b" " + line for time, line in self.logs[name] if time[:19] >= since)
        yield (data[start : start + self.piece] for start in range(0, len(data), self.piece))


def logging_pod(name: str, *, phase: str = "Running", number: int = 0) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "creationTimestamp": f"2026-01-01T00:00:{number:02d}Z",
        },
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": phase},
    }


def stamp(number: int) -> str:
    """Times that repeat, some without a fraction, as RFC3339Nano writes them."""
    fraction = "" if number % 5 == 0 else f".{number % 5}"
    return f"2026-01-01T00:00:{number // 5 % 60:02d}{fraction}Z"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=6)), max_size=25),
    st.lists(st.integers(0, 25), max_size=6),
    st.integers(1, 40),
    st.booleans(),
)
def test_what_was_read_in_parts_is_what_was_written(
    written: list[tuple[int, bytes]], looks: list[int], piece: int, open_end: bool
) -> None:
    at, lines = 0, []
    for step, text in written:
        at += step
        lines.append((stamp(at), text.replace(b"\n", b"") + b"\n"))
    if lines and open_end:
        lines[-1] = (lines[-1][0], lines[-1][1].rstrip(b"\n"))
    whole = b"".join(line for _, line in lines)
    kept, data, cursor = Kept({"a": []}, piece), b"", ""
    for seen in sorted(looks):
        kept.logs["a"] = lines[:seen]
        part = read_logs(kept, [logging_pod("a")], cursor)  # type: ignore[arg-type]
        data, cursor = data + part.data, part.cursor
    kept.logs["a"] = lines
    while (part := read_logs(kept, [logging_pod("a", phase="Failed")], cursor)).data:  # type: ignore[arg-type]
        data, cursor = data + part.data, part.cursor
    assert data == whole


def test_pods_follow_each_other_and_one_that_is_gone_is_passed_over() -> None:
    kept = Kept({name: [(stamp(1), name.encode() + b"\n")] for name in ("second", "first", "third")})
    pods = [logging_pod("second", number=2), logging_pod("first", number=1), logging_pod("third", number=3)]
    part = read_logs(kept, pods, "")  # type: ignore[arg-type]
    assert part.data == b"first\nsecond\nthird\n"
    kept.gone = {"first"}
    kept.logs["second"].append((stamp(2), b"more\n"))
    again = read_logs(kept, pods, part.cursor)  # type: ignore[arg-type]
    assert again.data == b"more\n"
    assert read_logs(kept, [pods[2]], again.cursor).data == b""  # type: ignore[arg-type]
    assert "uid-first" not in read_logs(kept, [pods[2]], again.cursor).cursor  # type: ignore[arg-type]


def test_much_of_one_second_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_logs, "LARGEST_PART", 50)
    lines = [(stamp(0), b"%04d\n" % number) for number in range(100)]
    kept, data, cursor, parts = Kept({"a": lines}), b"", "", 0
    while (part := read_logs(kept, [logging_pod("a")], cursor)).data:  # type: ignore[arg-type]
        data, cursor, parts = data + part.data, part.cursor, parts + 1
    assert data == b"".join(line for _, line in lines)
    assert parts == 10


@pytest.mark.parametrize("cursor", ["", "12", "[1]", "{", '{"a": 1}', '{"a": ["x", "y"]}'])
def test_a_cursor_of_another_kind_begins_anew(cursor: str) -> None:
    kept = Kept({"a": [(stamp(1), b"line\n")]})
    assert read_logs(kept, [logging_pod("a")], cursor).data == b"line\n"  # type: ignore[arg-type]


def certificate(folder: Path) -> Path:
    """Key and certificate of 127.0.0.1, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "double")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "certificate.pem"
    file.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return file


def test_a_service_inside_of_the_cluster_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, token = certificate(tmp_path), tmp_path / "token"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(file))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with running_double(context) as double:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", double.url.rpartition(":")[2])
        with pytest.raises(BackendDownError, match="no cluster is configured"):
            Kubernetes().jobs()
        token.write_text(TOKEN)
        assert Kubernetes().jobs() == []
        (tmp_path / "another").mkdir()
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate(tmp_path / "another")))
        with pytest.raises(BackendDownError, match=r"(?i)certificate"):
            Kubernetes().jobs()
