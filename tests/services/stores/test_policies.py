"""Session policies, evaluated: the requests of a real recorder are allowed, and no access to other runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.services.stores.iam import Request, allowed
from watchstep import Hook
from watchstep.errors import ConfigError
from watchstep.store.store import ObjectEntry, Store
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.role import MOST_CHARACTERS, attempt_policy, project_policy

BUCKET = "arn:aws:s3:::acme-training"
ROLE = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": f"{BUCKET}/runs/*",
            },
            {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": BUCKET},
        ],
    }
)
"""Of the registered role: more than one project lies below its prefix."""

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True).filter(
    lambda name: ".." not in name
)


def place(project: str = "vision", prefix: str = "team", **more: Any) -> StorePlace:
    role = more.pop("role", "arn:aws:iam::123456789012:role/watchstep")
    return StorePlace(1, 1, StoreRegistration("s3://acme-training/runs", role), prefix, project)


def calls(verb: str, key: str, base: str) -> list[Request]:
    """The S3 requests of a call to a store."""
    named, once = f"{BUCKET}/{base}{key}", {"s3:if-none-match": "*"}
    return {
        "create": [Request("s3:PutObject", named, once)],
        "put": [Request("s3:PutObject", named)],
        "parts": [Request("s3:PutObject", named), Request("s3:AbortMultipartUpload", named), Request("s3:GetObject", named)],
        "get": [Request("s3:GetObject", named)],
        "delete": [Request("s3:DeleteObject", named)],
        "list": [Request("s3:ListBucket", BUCKET, {"s3:prefix": base + key})],
    }[verb]  # fmt: skip


class Spy(Store):
    """Collects the calls to a store."""

    def __init__(self, inner: Store, seen: set[tuple[str, str]]) -> None:
        super().__init__(inner.url, inner._backend, inner._prefix)
        self.seen = seen

    def put(self, key: str, data: bytes) -> None:
        self.seen.add(("put", key))
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.seen.add(("create", key))
        return super().create(key, data)

    def create_in_parts(self, key: str, size: int, parts: Iterable[memoryview]) -> bool:
        self.seen.add(("parts", key))
        return super().create_in_parts(key, size, parts)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.seen.add(("get", key))
        return super().get(key, limit=limit)

    def entries(self, prefix: str = "") -> Iterator[ObjectEntry]:
        self.seen.add(("list", prefix))
        return super().entries(prefix)

    def delete(self, key: str) -> None:
        self.seen.add(("delete", key))
        super().delete(key)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """All that two ranks' recorders request of a store, with snapshots, restarts and a bad step."""
    import torch

    from tests.sdk.training import EVERY_STEP, Training

    seen: set[tuple[str, str]] = set()
    opened = Hook._open_store
    monkeypatch.setattr(Hook, "_open_store", lambda hook: Spy(opened(hook), seen))
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    for rank, size in (("0", "1"), ("0", "2"), ("0", "2"), ("1", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        hook = Hook(tmp_path / "store", project="vision", run=f"run-{size}", config=EVERY_STEP)
        training = Training()
        hook.watch(training.model, training.optimizer)
        training.run(2)
        with torch.no_grad():
            next(iter(training.model.parameters())).fill_(float("nan"))
        training.run(1)
        hook.close()
    return seen


@pytest.mark.ci
def test_a_recorder_may_do_all_that_it_does(recorded: set[tuple[str, str]]) -> None:
    assert {verb for verb, _ in recorded} >= {"create", "parts", "get", "list"}
    base = "runs/team/vision/run-1/"
    session = attempt_policy(place(), "run-1", "a1")
    for verb, key in recorded:
        for request in calls(verb, key, base):
            assert allowed(request, ROLE, session), (verb, key)


@given(project=NAMES, run=NAMES, attempt=NAMES, folder=st.sampled_from(["stats", "tensors", "end"]), verb=st.sampled_from(["create", "put", "delete"]))  # fmt: skip
def test_of_other_attempts_runs_and_projects_it_may_write_nothing(
    project: str, run: str, attempt: str, folder: str, verb: str
) -> None:
    assume((project, run, attempt) != ("vision", "run-1", "a1"))
    session = attempt_policy(place(), "run-1", "a1")
    for key in (f"{folder}/{attempt}/node/w0/0000000000-0-1.arrow", f"attempts/{attempt}.json"):
        for request in calls(verb, key, f"runs/team/{project}/{run}/"):
            assert not allowed(request, ROLE, session), request
    if (project, run) != ("vision", "run-1"):
        for foreign in ("get", "list", "create", "put", "delete"):
            for request in calls(foreign, "run.json", f"runs/team/{project}/{run}/"):
                assert not allowed(request, ROLE, session), request


@given(key=st.text("abc/.*?$%-_1", max_size=30), verb=st.sampled_from(["create", "put", "delete", "get", "list", "parts"]))  # fmt: skip
def test_outside_of_the_run_there_is_nothing_for_it(key: str, verb: str) -> None:
    base = "runs/team/vision/run-1/"
    assume(not key.startswith(base))
    session = attempt_policy(place(), "run-1", "a1")
    assert not any(allowed(request, ROLE, session) for request in calls(verb, key, ""))


@pytest.mark.parametrize("key", ["run.json", "attempts/a1.json", "stats/a1/n/w0/0000000000-0-1.arrow"])
def test_existing_objects_cannot_be_overwritten(key: str) -> None:
    base, session = "runs/team/vision/run-1/", attempt_policy(place(), "run-1", "a1")
    (created,), (replaced,), (removed,) = (calls(verb, key, base) for verb in ("create", "put", "delete"))
    assert allowed(created, ROLE, session)
    assert not allowed(replaced, ROLE, session)
    assert not allowed(removed, ROLE, session)


@pytest.mark.parametrize("key", ["control.json", "journal/a1/0000000000.json", "compacted/1/manifest.json"])
@pytest.mark.parametrize("verb", ["create", "put", "delete"])
def test_what_the_service_writes_it_may_not(key: str, verb: str) -> None:
    session = attempt_policy(place(), "run-1", "a1")
    assert not any(allowed(request, ROLE, session) for request in calls(verb, key, "runs/team/vision/run-1/"))


def test_a_recorder_may_do_nothing_else() -> None:
    session = attempt_policy(place(), "run-1", "a1")
    named = f"{BUCKET}/runs/team/vision/run-1/stats/a1/x"
    everything = json.dumps({"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]})
    for action in (
        "s3:PutObjectAcl",
        "s3:DeleteBucket",
        "s3:PutBucketPolicy",
        "sts:AssumeRole",
        "iam:PassRole",
    ):
        assert not allowed(Request(action, named), everything, session)
        assert not allowed(Request(action, BUCKET), everything, session)
    assert not allowed(Request("kms:Decrypt", "key"), everything, session)
    by_s3 = {"kms:ViaService": "s3.eu-central-1.amazonaws.com"}
    assert allowed(Request("kms:Decrypt", "key", by_s3), everything, session)


@given(project=NAMES, key=st.text("abc/.*-1", max_size=20))
def test_the_service_reads_a_project_by_its_own_session_and_no_other(project: str, key: str) -> None:
    session = project_policy(place())
    own = "runs/team/vision/"
    for verb in ("create", "put", "parts", "get", "delete", "list"):
        for request in calls(verb, key, own):
            assert allowed(request, ROLE, session), request
        if project != "vision":
            assert not any(
                allowed(request, ROLE, session) for request in calls(verb, key, f"runs/team/{project}/")
            )
            assert not any(
                allowed(request, ROLE, session) for request in calls(verb, key, f"runs/{project}/")
            )


def test_other_partitions_have_their_own_names() -> None:
    policy = json.loads(project_policy(place(role="arn:aws-cn:iam::123456789012:role/watchstep")))
    assert policy["Statement"][0]["Resource"] == "arn:aws-cn:s3:::acme-training/runs/team/vision/*"


@given(run=st.integers(1, 128), attempt=st.integers(1, 128), prefix=st.integers(0, 128))
def test_a_policy_is_never_longer_than_aws_takes_it(run: int, attempt: int, prefix: int) -> None:
    at, named = place(prefix="p" * prefix), ("r" * run, "a" * attempt)
    if run + attempt + prefix > 150:
        with contextlib.suppress(ConfigError):  # too long is refused; what comes is not too long
            assert len(attempt_policy(at, *named)) <= MOST_CHARACTERS
    else:
        assert len(attempt_policy(at, *named)) <= MOST_CHARACTERS


def test_names_that_are_too_long_are_reported() -> None:
    with pytest.raises(ConfigError, match="shorter names"):
        attempt_policy(place(), "r" * 128, "a" * 128)
