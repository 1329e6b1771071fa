"""Random requests from the OpenAPI document; all responses must conform to the document."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import checks as built_in
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.format.layout import SnapshotKey
from watchstep.store.store import Store
from watchstep_services.api.app import create_app

EXISTING = {
    "project": "vision",
    "run": "run-1",
    "attempt": "a1",
    "worker": 0,
    "step": 5,
    "mode": "train",
    "tensor": "loss",
    "figure": "mean",
    "name": "non_finite_values",
    "action": 1,
    "collection": "gradients",
}
"""Values that lead somewhere; each is taken as often as not."""

built_in.load_all_checks()
CHECKS: list[Any] = [
    built_in.not_a_server_error,
    *built_in.CHECKS.get_by_names(
        ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    ),
]
STREAMS = "/events/stream"
TIMEOUT = 300.0
MODES: tuple[Any, ...] = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@dataclass
class Tally:
    """Counts of requests and responses."""

    requests: int = 0
    operations: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def prepared(driven: Driven, store: Store) -> FastAPI:
    """An application with a run that fired, one that is damaged, and one that has not begun."""
    from safetensors.numpy import save

    for name, bad in (("run-1", 5), ("run-2", 10**6)):
        recording = Recording(store, name).begin()
        run_id = driven.register(name)
        driven.judge(run_id, recording.write(0, 0, 9, nan_from(bad)))
        recording.store.put(SnapshotKey("a1", 0, 5, "train").path, save({"loss": np.arange(6.0)}))
    Recording(store, "run-2").store.put(SnapshotKey("a1", 0, 5, "train").path, b"\xff" * 64)
    driven.register("run-3")
    return create_app(driven.service)


def fuzz(app: FastAPI, token: str, examples: int, number: int = 1) -> Tally:
    """Send requests to every operation, by the document and against it.

    Args:
        app: from `prepared`.
        token: that may do everything.
        examples: requests for each operation and way.
        number: another one makes other requests.
    """
    tally = Tally()
    for item in app.openapi()[
        "paths"
    ].values():  # who may is tested elsewhere: half of the requests would go without a token
        for operation in item.values():
            operation.pop("security", None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path.endswith(STREAMS):
            continue  # they do not end
        tally.operations += 1
        for mode in MODES:
            _fuzz_one(operation, mode, token, (examples, number), tally)
    return tally


def _fuzz_one(
    operation: schemathesis.APIOperation[Any, Any, Any, Any],
    mode: Any,
    token: str,
    how: tuple[int, int],
    tally: Tally,
) -> None:
    examples, number = how

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
    def check(case: schemathesis.Case[Any], chance: Random) -> None:
        _steer(case, chance)
        tally.requests += 1
        for name in [name for name in case.headers or {} if name.lower() == "authorization"]:
            del case.headers[name]  # of two, the first would count
        response = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT)
        tally.statuses[response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as failures:
            messages = "; ".join(str(failure).replace("\n", " ")[:300] for failure in failures.exceptions)
            request = f"{case.method} {case.formatted_path}?{case.query} {str(case.body)[:200]}"
            tally.faults.append(f"{request}: {response.status_code} {messages}")

    with suppress(Unsatisfiable):  # nothing contradicts an operation without parameters
        check()


def _steer(case: schemathesis.Case[Any], chance: Random) -> None:
    """Most random names lead nowhere."""
    for part in (case.path_parameters, case.query):
        for name in part or ():
            if name in EXISTING and chance.random() < 0.7:
                part[name] = EXISTING[name]
