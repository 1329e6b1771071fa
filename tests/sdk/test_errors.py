from __future__ import annotations

import pickle

import pytest

from watchstep import errors
from watchstep.platform.transport import ServiceRefusedError
from watchstep.reading.compacted import CompactedSegmentLostError


def test_an_error_states_its_cause_and_a_hint() -> None:
    error = errors.StoreError("store s3://ml/runs: access denied", "check the credentials")
    assert (error.what, error.hint) == ("store s3://ml/runs: access denied", "check the credentials")
    assert str(error) == "store s3://ml/runs: access denied\n  hint: check the credentials"


@pytest.mark.parametrize(
    "kind",
    [errors.ConfigError, errors.StoreError, errors.FormatError, errors.RuleError, errors.ServiceError],
)
def test_one_except_clause_catches_them_all(kind: type[errors.WatchstepError]) -> None:
    with pytest.raises(errors.WatchstepError):
        raise kind("what", "hint")


def test_a_missing_object_is_a_store_error_and_a_bad_name_a_config_error() -> None:
    assert issubclass(errors.NotFoundError, errors.StoreError)
    assert issubclass(errors.BadNameError, errors.ConfigError)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("store x: no such scheme", "use file:// or s3://"),
        CompactedSegmentLostError("parts/1.parquet", "part parts/1.parquet: gone"),
        ServiceRefusedError(429, "urn:watchstep:problem:rate", "too many requests", "wait", 3.0),
    ],
)
def test_an_error_of_a_worker_process_reaches_its_parent(error: errors.WatchstepError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)
