"""infra/terraform/aws, as far as it can be checked without Terraform: it parses, refers to what there is, and grants little."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import hcl2
import pytest

from tests.infra.compose import ROOT

FOLDER = ROOT / "infra" / "terraform" / "aws"
FILES = sorted(FOLDER.glob("*.tf"))
_REFERENCE = re.compile(r"\b(?:data\.)?((?:aws_\w+)\.\w+|var\.\w+|local\.\w+)")


def plain(value: Any) -> Any:
    """What python-hcl2 read, without the quotes and marks that it keeps."""
    if isinstance(value, dict):
        return {
            str(key).strip('"'): plain(child)
            for key, child in value.items()
            if key not in {"__is_block__", "__comments__", "__inline_comments__"}
        }
    if isinstance(value, list):
        return [plain(child) for child in value]
    return value.strip('"') if isinstance(value, str) else value


def blocks(kind: str) -> Iterator[dict[str, Any]]:
    for file in FILES:
        with file.open(encoding="utf-8") as text:
            yield from plain(hcl2.load(text)).get(kind, [])


def resources(kind: str = "resource") -> dict[str, dict[str, Any]]:
    """``type.name`` → body."""
    return {
        f"{of}.{name}": body
        for block in blocks(kind)
        for of, named in block.items()
        for name, body in named.items()
    }


def statements(document: str) -> Iterator[dict[str, Any]]:
    """Of a policy document, those within ``dynamic`` too."""
    body = resources("data")[f"aws_iam_policy_document.{document}"]
    yield from body.get("statement", [])
    for dynamic in body.get("dynamic", []):
        for inner in dynamic.values():
            yield from inner["content"]


def actions(document: str) -> set[str]:
    return {action for statement in statements(document) for action in statement["actions"]}


PERMISSIONS = ("service", "store", "recorder")
TRUST = ("service_trust", "store_trust", "recorder_trust")


@pytest.mark.ci
def test_whatever_is_named_is_there() -> None:
    declared_names = set(resources()) | set(resources("data"))
    declared_names |= {f"var.{name}" for block in blocks("variable") for name in block}
    declared_names |= {f"local.{name}" for block in blocks("locals") for name in block}
    for file in FILES:
        text = re.sub(r"#.*", "", file.read_text(encoding="utf-8"))
        text = re.sub(r'^(resource|data) "(\w+)" "(\w+)"', "", text, flags=re.MULTILINE)
        for name in _REFERENCE.findall(text):
            assert name in declared_names, f"{file.name}: {name}"
    used = {name for file in FILES for name in re.findall(r"\bvar\.(\w+)", file.read_text(encoding="utf-8"))}
    assert used == {name for block in blocks("variable") for name in block}


@pytest.mark.parametrize("document", PERMISSIONS)
def test_no_right_is_a_wildcard(document: str) -> None:
    for statement in statements(document):
        assert statement.get("effect", "Allow") == "Allow"
        assert not {"not_actions", "not_resources"} & statement.keys()
        for action in statement["actions"]:
            assert re.fullmatch(r"[a-z0-9]+:[A-Z][A-Za-z]+", action), action
        for resource in statement["resources"]:
            assert resource != "*"
            # Within the bucket, only below the prefix; a star ends a path or stands for project and run.
            beyond = re.sub(r"/\$\{var\.prefix\}/\*(/tensors/\*)?$", "", resource)
            assert "*" not in beyond, resource


def test_roles_can_do_what_they_need_and_no_more() -> None:
    keys = {"kms:GenerateDataKey", "kms:Decrypt"}
    assert actions("service") == {"sts:AssumeRole", "sqs:SendMessage", "sqs:GetQueueUrl"} | keys
    objects = {"s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListBucket", "s3:DeleteObject"}
    assert actions("store") == objects | keys
    assert actions("recorder") == objects | keys
    for document in ("store", "recorder"):
        (listing,) = [each for each in statements(document) if each["actions"] == ["s3:ListBucket"]]
        (condition,) = listing["condition"]
        assert (condition["variable"], condition["values"]) == ("s3:prefix", ["${var.prefix}/*"])
    (deleting,) = [each for each in statements("recorder") if "s3:DeleteObject" in each["actions"]]
    assert deleting["resources"] == ["${aws_s3_bucket.runs.arn}/${var.prefix}/*/tensors/*"]


@pytest.mark.parametrize("document", TRUST)
def test_roles_cannot_be_assumed_by_chance(document: str) -> None:
    for statement in statements(document):
        (principal,) = statement["principals"]
        assert principal["type"] in {"AWS", "Federated"}
        assert "*" not in str(principal["identifiers"])
        conditions = {each["variable"]: each["values"] for each in statement.get("condition", [])}
        if document != "service_trust":
            assert conditions == {"sts:ExternalId": ["${var.external_id}"]}
        elif principal["type"] == "Federated":
            assert any(name.endswith(":sub") for name in conditions)
            assert any(name.endswith(":aud") for name in conditions)


def test_the_bucket_is_closed_kept_and_encrypted() -> None:
    declared = resources()
    closed = declared["aws_s3_bucket_public_access_block.runs"]
    assert [closed[name] for name in closed if name.startswith(("block", "ignore", "restrict"))] == [True] * 4
    (versioning,) = declared["aws_s3_bucket_versioning.runs"]["versioning_configuration"]
    assert versioning["status"] == "Enabled"
    assert "aws_s3_bucket_server_side_encryption_configuration.runs" in declared
    rules = declared["aws_s3_bucket_lifecycle_configuration.runs"]["rule"]
    assert {rule["id"] for rule in rules} == {"versions", "uploads"}
    (denied,) = statements("bucket")
    assert (denied["effect"], denied["condition"][0]["variable"]) == ("Deny", "aws:SecureTransport")


def test_secrets_are_marked_and_no_output_shows_one() -> None:
    variables = {name: body for block in blocks("variable") for name, body in block.items()}
    assert variables["external_id"]["sensitive"] is True
    for body in variables.values():
        assert body["description"]
    for block in blocks("output"):
        for body in block.values():
            assert "external_id" not in body["value"]
