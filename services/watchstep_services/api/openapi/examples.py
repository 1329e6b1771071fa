"""Examples that follow from a JSON schema: its own, its defaults, or what a field of that name may hold."""

from __future__ import annotations

from typing import Any

_TIME = 1_795_212_000_000_000_000
_HASH = "^[0-9a-f]{32}$"
_UUID = "0b8f7c1e-6a53-4f0e-9d2c-3a1f5e7b9c24"

_WORDS: dict[str, str] = {
    "project": "vision",
    "run": "resnet50-17",
    "attempt": "a-20261121-0900",
    "name": "vanishing_gradient",
    "rule": "vanishing_gradient",
    "url": "https://watchstep.example/v1/projects/vision/runs/resnet50-17",
    "tensor": "conv1.weight:gradient",
    "figure": "l2",
    "collection": "gradients",
    "origin": "operator",
    "phase": "firing",
    "severity": "critical",
    "state": "running",
    "health": "ok",
    "backend": "local",
    "kind": "stop",
    "outcome": "done",
    "role": "operator",
    "node": "node-0",
    "writer": "rank-0",
    "mode": "train",
    "stage": "reduced",
    "dtype": "F32",
    "reason": "the learning rate was ten times too high",
    "message": "gradient of conv1.weight vanishes",
    "id": _UUID,
    "event_id": _UUID,
    "event": _UUID,
    "subject": "vision/resnet50-17",
    "source": "https://watchstep.example/v1/projects/vision/runs/resnet50-17",
    "time": "2026-11-21T09:00:00Z",
    "since": "2026-11-21T00:00:00Z",
    "until": "2026-11-22T00:00:00Z",
    "query": "SELECT step, max(abs_max) AS largest FROM statistics GROUP BY step",
    "label": "team=vision",
    "page_token": "WzE3XQ",
    "next_page_token": "WzE3XQ",
    "Idempotency-Key": _UUID,
    "If-Match": '"5f2b0c9e4a7d1f3386c0b1a2d3e4f506"',
    "Range": "bytes=0-4095",
    "description": "Gradients of a layer are close to zero.",
    "summary": "Gradients of a layer are close to zero.",
    "type": "io.watchstep.alert.firing",
    "title": "NotFound",
    "env": "WATCHSTEP_RECEIVER_ONCALL",
    "detail": "run vision/resnet50-17: not known",
    "hint": "register it first, or check the name",
}
_NUMBERS: dict[str, int] = {
    "step": 1200,
    "last_step": 1200,
    "since_step": 1190,
    "worker": 0,
    "world_size": 8,
    "bytes": 37632,
    "count": 9408,
    "status": 404,
    "version": 1,
    "limit": 100,
    "points": 1000,
    "Last-Event-ID": 41,
    "after": 41,
    "number": 1,
}


def example_of(
    schema: dict[str, Any], document: dict[str, Any], name: str, within: tuple[str, ...] = ()
) -> Any:
    """A value that a schema allows.

    Args:
        schema: of the value.
        document: where its references lead.
        name: of the field or parameter.
        within: the references that led to it; one that leads to itself ends there.
    """
    if "$ref" in schema:
        within = (*within, schema["$ref"])
        schema = _at(document, schema["$ref"])
    for given in ("example", "const"):
        if given in schema:
            return schema[given]
    for given in ("examples", "enum"):
        if schema.get(given):
            return _hinted(schema[given], name) if given == "enum" else schema[given][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            chosen = next((one for one in schema[several] if one.get("type") != "null"), {"type": "null"})
            return example_of(chosen, document, name, within)
    return _made(schema, document, name, within)


def _made(schema: dict[str, Any], document: dict[str, Any], name: str, within: tuple[str, ...]) -> Any:
    kind = schema.get("type")
    if kind == "object":
        held = schema.get("properties", {})
        return {key: example_of(value, document, key, within) for key, value in held.items()}
    if kind == "array":
        if "prefixItems" in schema:
            return [example_of(one, document, name, within) for one in schema["prefixItems"]]
        if schema.get("items", {}).get("$ref") in within:
            return []
        item = example_of(schema.get("items", {}), document, name.removesuffix("s"), within)
        return [item] * max(1, schema.get("minItems", 1))
    if schema.get("default") is not None:
        return schema["default"]
    if kind == "string":
        return _word(schema, name)
    if kind == "integer":
        return _bounded(schema, _TIME if name.endswith("_ns") else _NUMBERS.get(name, 1))
    if kind == "number":
        return _bounded(schema, 0.5)
    return {"boolean": True, "null": None}.get(str(kind), {})


def _word(schema: dict[str, Any], name: str) -> str:
    if schema.get("format") == "binary":
        return ""
    text = _WORDS.get(name, "text")
    if schema.get("pattern") == _HASH:
        return "5f2b0c9e4a7d1f3386c0b1a2d3e4f506"
    return text[: schema.get("maxLength", len(text))]


def _bounded(schema: dict[str, Any], value: Any) -> Any:
    if "maximum" in schema:
        value = min(value, schema["maximum"])
    if "exclusiveMaximum" in schema:
        value = min(value, schema["exclusiveMaximum"] - 1)
    return max(value, schema.get("minimum", value))


def _hinted(allowed: list[Any], name: str) -> Any:
    return _WORDS[name] if _WORDS.get(name) in allowed else allowed[0]


def _at(document: dict[str, Any], reference: str) -> dict[str, Any]:
    held: Any = document
    for part in reference.removeprefix("#/").split("/"):
        held = held[part]
    assert isinstance(held, dict)
    return held
