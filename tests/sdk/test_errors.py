from __future__ import annotations

import pytest

from watchstep import errors


def test_an_error_says_what_and_how_to_mend_it() -> None:
    error = errors.StoreError("store s3://ml/runs: access denied", "check the credentials")
    assert (error.what, error.mend) == ("store s3://ml/runs: access denied", "check the credentials")
    assert str(error) == "store s3://ml/runs: access denied\n  mend: check the credentials"


@pytest.mark.parametrize(
    "kind",
    [errors.ConfigError, errors.StoreError, errors.FormatError, errors.RuleError, errors.ServiceError],
)
def test_one_except_clause_catches_them_all(kind: type[errors.WatchstepError]) -> None:
    with pytest.raises(errors.WatchstepError):
        raise kind("what", "mend")


def test_a_missing_object_is_a_store_error_and_a_bad_name_a_config_error() -> None:
    assert issubclass(errors.NotFoundError, errors.StoreError)
    assert issubclass(errors.BadNameError, errors.ConfigError)
