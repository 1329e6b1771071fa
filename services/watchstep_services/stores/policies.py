"""Session policies: of what a role may do, what one project, or one attempt of a run, needs.

AWS lets a session do what both the role's policies and the session's policy allow. Names that Watchstep takes hold none of the
characters that a policy gives a meaning (``*``, ``?``, ``$``).
"""

from __future__ import annotations

import json
from typing import Any

from watchstep.errors import ConfigError
from watchstep.format.layout import (
    ENDS,
    RUN_DOCUMENT,
    SNAPSHOTS,
    attempt_document,
    check_name,
)
from watchstep_services.core.store_location import StorePlace

MOST_CHARACTERS = 2048
"""That AWS takes of a session policy."""

_ADDED = "s????/"
"""Segments (``stats/``), notes of checkpoints (``saved/``) and answers to stops (``stops/``) in one pattern, for a policy has no room for two: a ``?`` is one
character, so that what follows can only be the attempt."""

_CREATES_ONLY = {"Null": {"s3:if-none-match": "false"}}
"""The request says ``If-None-Match``, so that it replaces nothing."""


def project_policy(place: StorePlace) -> str:
    """What the service needs of a project: its objects, and no others.

    Raises:
        ConfigError: its names are too long for a session policy, or its store is not on S3.
    """
    bucket = _arn(place)
    change = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return _text(
        place,
        [
            _allow(change, f"{bucket}/{place.key}/*"),
            _allow("s3:ListBucket", bucket, {"StringLike": {"s3:prefix": f"{place.key}/*"}}),
            _ENCRYPTION,
        ],
    )


def attempt_policy(place: StorePlace, run: str, attempt: str) -> str:
    """What a recorder needs of one attempt: it makes the run and the attempt, adds statistics, and writes snapshots and ends.

    It reads and lists its own run, for its length's sake not only the attempt. What makes a run, an attempt or a segment
    cannot be replaced by it, nor removed.

    Raises:
        BadNameError: a name cannot be used.
        ConfigError: the names are too long for a session policy, or the store is not on S3.
    """
    bucket = _arn(place)
    check_name("attempt", attempt)
    within = f"{place.key}/{check_name('run', run)}"
    root = f"{bucket}/{within}"
    added, snapshots, ends = (f"{folder}{attempt}/*" for folder in (_ADDED, SNAPSHOTS, ENDS))
    made = [f"{root}/{key}" for key in (RUN_DOCUMENT, attempt_document(attempt), added)]
    changed = [f"{root}/{key}" for key in (snapshots, ends)]
    change = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return _text(
        place,
        [
            _allow("s3:PutObject", made, _CREATES_ONLY),
            _allow(change, changed),
            _allow("s3:GetObject", f"{root}/*"),
            _allow("s3:ListBucket", bucket, {"StringLike": {"s3:prefix": f"{within}/*"}}),
            _ENCRYPTION,
        ],
    )


def _arn(place: StorePlace) -> str:
    bucket, _ = place.registration.bucket_and_key
    named = place.registration.role_arn.split(":")
    return f"arn:{named[1] if len(named) > 1 else 'aws'}:s3:::{bucket}"


def _allow(action: Any, resource: Any, condition: dict[str, Any] | None = None) -> dict[str, Any]:
    held = {"Effect": "Allow", "Action": action, "Resource": resource}
    return held if condition is None else {**held, "Condition": condition}


_ENCRYPTION = _allow(
    ["kms:Decrypt", "kms:GenerateDataKey"], "*", {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com*"}}
)
"""Of a bucket that is encrypted by a key of its own: what S3 does with it for the session, if the role may."""


def _text(place: StorePlace, statements: list[dict[str, Any]]) -> str:
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"project {place.project!r}: a session policy of {len(text)} characters, {MOST_CHARACTERS} at the most",
            "use shorter names for the store's prefix, the project, the run or the attempt",
        )
    return text
