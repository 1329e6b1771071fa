"""The policy evaluator, tested with cases from AWS's documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.stores.iam import Request, allowed, like

OBJECT = "arn:aws:s3:::b/a/x"
GET = Request("s3:GetObject", OBJECT)


def policy(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def allow(action: Any, resource: Any, **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (policy(), False),
        (policy(allow("s3:GetObject", OBJECT)), True),
        (policy(allow("S3:getobject", OBJECT)), True),
        (policy(allow("s3:Get*", "arn:aws:s3:::b/*")), True),
        (policy(allow("s3:PutObject", OBJECT)), False),
        (policy(allow("s3:GetObject", "arn:aws:s3:::B/a/x")), False),
        (policy(allow("s3:GetObject", "arn:aws:s3:::b/?/x")), True),
        (policy(allow("*", "*"), {"Effect": "Deny", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::b/a/*"}), False),
        (policy(allow("*", "*"), {"Effect": "Deny", "NotAction": "s3:GetObject", "Resource": "*"}), True),
        (policy({"Effect": "Allow", "Action": "*", "NotResource": "arn:aws:s3:::b/a/*"}), False),
    ],
)  # fmt: skip
def test_statements(text: str, expected: bool) -> None:
    assert allowed(GET, text) is expected


@pytest.mark.parametrize(
    ("condition", "context", "expected"),
    [
        ({"StringLike": {"s3:prefix": "a/*"}}, {"s3:prefix": "a/"}, True),
        ({"StringLike": {"s3:prefix": "a/*"}}, {"s3:prefix": "a"}, False),
        ({"StringLike": {"s3:prefix": "a/*"}}, {}, False),
        ({"StringLikeIfExists": {"s3:prefix": "a/*"}}, {}, True),
        ({"StringLike": {"s3:prefix": ["b", "a/?"]}}, {"S3:Prefix": "a/x"}, True),
        ({"StringEquals": {"s3:prefix": "a/*"}}, {"s3:prefix": "a/x"}, False),
        ({"StringNotLike": {"s3:prefix": "a/*"}}, {"s3:prefix": "b"}, True),
        ({"Null": {"s3:if-none-match": "false"}}, {}, False),
        ({"Null": {"s3:if-none-match": "false"}}, {"s3:if-none-match": "*"}, True),
        ({"Null": {"s3:if-none-match": "true"}}, {}, True),
        ({"Bool": {"aws:SecureTransport": "false"}}, {"aws:SecureTransport": "true"}, False),
    ],
)
def test_conditions(condition: dict[str, Any], context: dict[str, str], expected: bool) -> None:
    statements = policy(allow("s3:ListBucket", "arn:aws:s3:::b", Condition=condition))
    assert allowed(Request("s3:ListBucket", "arn:aws:s3:::b", context), statements) is expected


def test_a_session_has_what_both_allow() -> None:
    role, session = policy(allow("s3:*", "arn:aws:s3:::b/*")), policy(allow("s3:GetObject", "*"))
    assert allowed(GET, role, session)
    assert not allowed(Request("s3:PutObject", OBJECT), role, session)
    assert not allowed(Request("s3:GetObject", "arn:aws:s3:::other/a/x"), role, session)
    assert not allowed(
        GET, policy(allow("s3:*", "*"), {"Effect": "Deny", "Action": "*", "Resource": OBJECT}), session
    )


def test_what_it_does_not_know_it_refuses() -> None:
    statements = policy(allow("*", "*", Condition={"IpAddress": {"s3:x": "1"}}))
    with pytest.raises(NotImplementedError):
        allowed(Request("s3:GetObject", OBJECT, {"s3:x": "1"}), statements)
    with pytest.raises(AssertionError):
        like("a", "${aws:username}")
