"""Tenants cannot see each other by any id: for one, what belongs to another does not exist.

Another tenant's rows are planted in every table that there is, and every operation of the OpenAPI document is walked with
their ids, so that new tables and routes are covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

from tests.services.api.conftest import Api
from tests.services.api.walking import Answer, Ask, Operation, asking, operations, published_document
from tests.services.recording import nan_from
from watchstep_services.api.app import create_app
from watchstep_services.auth import Role
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Base

MINE, THEIRS = "vision", "language"
RUN = "mine"
CONTENT = "tells-much"
HIDDEN, ABSENT = "zq-hidden", "zq-absent"
SHARED = frozenset({"api_requests"})
"""Tables whose rows are found by a hash of the caller's own token."""


@dataclass
class Planted:
    """Rows of another tenant: what was put where, and the ids by which somebody could ask for them."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def plant(database: Database) -> Planted:
    """One row of their project in every table."""
    planted = Planted()
    for place, table in enumerate(Base.metadata.sorted_tables):
        if table.name in SHARED:
            continue
        row = {column.key: value_for(column, place, planted) for column in table.columns}
        with database.write() as session:
            session.execute(table.insert().values(**row))
        planted.rows[table.name] = row
        unique = {column.key for column in table.columns if is_name(column)}
        for name in unique | {"run"} & set(row):
            value = row[name]
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                planted.numbers.add(value)
            elif isinstance(value, str) and value.startswith(HIDDEN):
                planted.names.add(value)
    return planted


def is_name(column: sa.Column[Any]) -> bool:
    return bool(
        column.primary_key or column.unique or column.foreign_keys or column.name in {"run", "name", "id"}
    )


def value_for(column: sa.Column[Any], place: int, planted: Planted) -> Any:
    for key in column.foreign_keys:
        planted_row = planted.rows.get(key.column.table.name)
        if planted_row is not None:
            return planted_row[key.column.key]
    if column.name in {"project", "owner_project"} or (column.table.name, column.name) == (
        "projects",
        "name",
    ):
        return THEIRS
    kind = column.type
    if isinstance(kind, sa.Boolean):
        return False
    if isinstance(kind, sa.Integer | sa.BigInteger):
        return 10_000 * (place + 1) if column.primary_key or column.unique else 1
    if isinstance(kind, sa.Float | sa.Numeric):
        return 1.0
    if isinstance(kind, sa.JSON):
        return {CONTENT: CONTENT}
    if isinstance(kind, sa.LargeBinary):
        return CONTENT.encode()
    text = f"{HIDDEN}{place}{column.name}" if is_name(column) else CONTENT
    return text[: getattr(kind, "length", None) or 100]


def dumped(database: Database, planted: Planted) -> dict[str, object]:
    """Their rows as stored in the database."""
    found: dict[str, object] = {}
    with database.read() as session:
        for name, row in planted.rows.items():
            table = Base.metadata.tables[name]
            same = [column == row[column.key] for column in table.primary_key]
            found[name] = session.execute(sa.select(table).where(*same)).one()._asdict()
    return found


def sample(schema: dict[str, Any], document: dict[str, Any], text: str) -> Any:
    """A value that a schema accepts; unrestricted strings are this text."""
    if "$ref" in schema:
        return sample(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], document, text)
    for given in ("const", "default"):
        if given in schema and schema[given] not in (None, "", [], {}):
            return schema[given]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return sample(schema[several][0], document, text)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        wanted = schema.get("properties", {})
        return {
            name: sample(value, document, text)
            for name, value in wanted.items()
            if name in schema.get("required", ())
        }
    if kind == "array":
        return [sample(schema.get("items", {}), document, text)] if schema.get("minItems") else []
    return {"integer": schema.get("minimum", 1), "number": 1.0, "boolean": False, "string": text}.get(
        str(kind), {}
    )


def bodies(operation: Operation, document: dict[str, Any], text: str) -> Iterator[Any]:
    content = operation.definition.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        yield None
        return
    schema = content["schema"]
    yield sample(schema, document, text)
    named = document["components"]["schemas"].get(schema.get("$ref", "").rsplit("/", 1)[-1], schema)
    yield from named.get("examples", [])[:1]


def ids(operation: Operation, planted: Planted) -> Iterator[tuple[str, dict[str, object]]]:
    """Of what is theirs, and values of the path: mine as far as the run goes and theirs after it, and theirs altogether."""
    own: dict[str, object] = {"project": MINE}
    free = [name for name in operation.parameters if name != "project"]
    for name in free:
        number = operation.parameters[name].get("type") == "integer"
        for value in sorted(planted.numbers) if number else sorted(planted.names):
            theirs = {other: theirs_of(operation, other, planted) for other in free}
            yield name, {**own, **theirs, **({"run": RUN} if "run" in free else {}), name: value}
    if not free:
        yield "", own


def theirs_of(operation: Operation, name: str, planted: Planted) -> object:
    if operation.parameters[name].get("type") == "integer":
        return min(planted.numbers)
    return planted.rows["runs"]["run"] if name == "run" else min(planted.names)


def absent(values: dict[str, object]) -> dict[str, object]:
    """Ids of the same form that do not exist."""
    return {
        name: value + 500_000 if isinstance(value, int) else str(value).replace(HIDDEN, ABSENT)
        for name, value in values.items()
    }


def plain(answer: Answer, values: dict[str, object]) -> str:
    text = answer.text
    for value in sorted(map(str, values.values()), key=len, reverse=True):
        text = text.replace(value, "?")
    return text


@dataclass
class Walk:
    """Requests of one tenant, and what must hold for each answer."""

    ask: Ask
    token: str
    document: dict[str, Any]
    requested: int = 0

    def compare(
        self, operation: Operation, values: dict[str, object], answers: dict[str, Answer], name: str
    ) -> None:
        """Objects of another tenant get the same answer as missing ones; the latter are requested once for each name in the path."""
        nobodys = absent(values)
        theirs = list(bodies(operation, self.document, f"{HIDDEN}-run"))
        others = list(bodies(operation, self.document, f"{ABSENT}-run"))
        for place, (body, other) in enumerate(zip(theirs, others, strict=True)):
            key = f"{name} {place}"
            if place and key in answers:
                continue
            answer = self.ask(operation.method, operation.at(values), self.token, body)
            if key not in answers:
                answers[key] = self.ask(operation.method, operation.at(nobodys), self.token, other)
                answers[f"{key} text"] = Answer(0, {}, plain(answers[key], nobodys))
            call = (operation.method, operation.at(values), answer, answers[key])
            assert CONTENT not in answer.text, call
            assert THEIRS not in answer.text, call
            assert answer.status == answers[key].status, call
            if answer.status >= 400:
                normalized = plain(answer, values).replace(HIDDEN, ABSENT)
                assert normalized == answers[f"{key} text"].text, call
            self.requested += 1

    def other_project(self, operation: Operation, run: str) -> None:
        """Their project is refused as one that does not exist."""
        place = operation.at({"project": THEIRS, "run": run})
        refused = self.ask(operation.method, place, self.token)
        unknown = self.ask(operation.method, place.replace(THEIRS, "nobodys"), self.token)
        assert (refused.status, refused.text) == (403, unknown.text.replace("nobodys", THEIRS))


@pytest.mark.ci
def test_objects_of_other_projects_do_not_exist(api: Api) -> None:
    api.call("POST", f"/v1/projects/{MINE}/runs", {"run": RUN})
    api.driven.announce(1, api.driven.recording(run=RUN).begin().write(0, 0, 9, nan_from(5)))
    planted = plant(api.driven.service.database)
    before = dumped(api.driven.service.database, planted)
    assert before == planted.rows
    app = create_app(api.driven.with_settings(requests_per_minute=0).service)
    with asking(app) as ask:
        walk_all(Walk(ask, api.token("admin", MINE), published_document()), planted)
    assert dumped(api.driven.service.database, planted) == before


def walk_all(walk: Walk, planted: Planted) -> None:
    # What makes things of a given name comes last: then nothing is there that the walk itself has made.
    order = ("GET", "DELETE", "POST", "PATCH", "PUT")
    for operation in sorted(operations(walk.document), key=lambda entry: order.index(entry.method)):
        answers: dict[str, Answer] = {}
        for name, values in ids(operation, planted):
            walk.compare(operation, values, answers, name)
        if "{project}" in operation.path:
            walk.other_project(operation, planted.rows["runs"]["run"])
    assert walk.requested > 100


def test_every_table_is_planted(api: Api) -> None:
    planted = plant(api.driven.service.database)
    assert set(planted.rows) | SHARED == set(Base.metadata.tables)
    assert {THEIRS} <= {row.get("project") for row in planted.rows.values()}


@pytest.mark.ci
def test_lists_contain_own_objects_only(api: Api) -> None:
    roles: tuple[Role, ...] = ("viewer", "recorder", "operator")
    planted = plant(api.driven.service.database)
    assert planted.rows
    tokens = {role: api.token(role, MINE) for role in roles}
    with asking(api.client.app) as ask:
        for role, operation in product(roles, operations()):
            if operation.method == "GET" and operation.permission != "none":
                answer = ask("GET", operation.at({"project": MINE}), tokens[role])
                for theirs in (CONTENT, THEIRS, HIDDEN):
                    assert theirs not in answer.text, (role, operation.path)
