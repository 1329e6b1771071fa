"""The JSON schema of rule files, for editors: made from the models, with each rule's own parameters."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from watchstep_rules.registry import KINDS, RULES
from watchstep_rules.rule_files.presets import PRESETS
from watchstep_rules.rule_files.rule_file import RuleFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ACTIONS = ("StopAction", "SnapshotAction", "WebhookAction", "NotifyAction")


def rule_file_schema() -> dict[str, Any]:
    """The schema of a rule file, draft 2020-12.

    What depends on other parts of the file, such as names that clash, a schema cannot say: ``watchstep rules check`` does.
    """
    rules = {**RULES, **KINDS}
    params = [rule.params_type for rule in rules.values()]
    wanted: list[Any] = [(RuleFile, "validation"), *((kind, "validation") for kind in dict.fromkeys(params))]
    made, schema = models_json_schema(wanted, by_alias=True)
    definitions = schema["$defs"]
    file = definitions.pop(_name(made[RuleFile, "validation"]))
    file["properties"]["preset"]["anyOf"][0]["enum"] = sorted(PRESETS)
    config = definitions["RuleConfig"]
    config["properties"]["rule"] = {**config["properties"]["rule"], "enum": sorted(rules)}
    config["properties"]["labels"]["additionalProperties"] = False  # names of another form
    config["properties"]["params"].pop("additionalProperties", None)
    config["allOf"] = [
        _params_of(name, made[rule.params_type, "validation"], bool(_required(rule.params_type)))
        for name, rule in sorted(rules.items())
    ]
    for action in _ACTIONS:
        definitions[action]["required"] = sorted({"kind", *definitions[action].get("required", ())})
    return {
        "$schema": DIALECT,
        **file,
        "title": "Watchstep rule file",
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """The schema as it is published."""
    return json.dumps(rule_file_schema(), indent=1, ensure_ascii=False) + "\n"


def _params_of(rule: str, params: Any, needed: bool) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"params": params}}
    if needed:
        then["required"] = ["params"]
    return {"if": {"properties": {"rule": {"const": rule}}, "required": ["rule"]}, "then": then}


def _required(params: Any) -> list[str]:
    return [name for name, field in params.model_fields.items() if field.is_required()]


def _name(reference: Any) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
