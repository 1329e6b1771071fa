"""Projects that had a URL keep their place, on both databases, up and down."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import select

from watchstep_launch.backend import JobHandle
from watchstep_services.db.engine import Database
from watchstep_services.db.models import JobOwner, Project, StoreRow
from watchstep_services.db.schema import downgrade, upgrade
from watchstep_services.tenancy import backends_of, digest_of

IDENTITY = {"pid": 7, "start_ticks": 9, "boot": "b", "host": "h"}
PLACES = {"audio": "s3://runs/audio", "text": "/data/runs", "vision": "/data/runs"}


def _before(database: Database) -> None:
    """A database as an earlier version left it, with a bound job."""
    upgrade(database, "0006")
    with database.engine.begin() as connection:
        for name, url in PLACES.items():
            connection.execute(
                sa.text("INSERT INTO projects (name, store_url, listed_ns) VALUES (:name, :url, 0)"),
                {"name": name, "url": url},
            )
        tables = sa.MetaData()
        tables.reflect(connection, only=["runs", "jobs"])
        for number, project in enumerate(("vision", "audio"), 1):
            run = {
                "id": number, "project": project, "run": "r", "state": "running", "attempt": "a1", "epoch": 0,
                "lease_until_ns": 0, "cursor": "{}", "journal": 0, "ticks": 0, "last_step": -1, "control": {}, "health": {},
                "created_ns": 1, "heard_ns": 1, "listed_ns": 0, "hints": 0,
            }  # fmt: skip
            connection.execute(tables.tables["runs"].insert().values(run))
            job = {
                "id": number, "run_id": number, "attempt": "a1", "backend": "local", "job_id": "7", "identity": IDENTITY,
                "bound_by": "operator", "state": "running",
            }  # fmt: skip
            connection.execute(tables.tables["jobs"].insert().values(job))


def test_urls_become_registered_stores_and_come_back(empty_database: Database) -> None:
    database = empty_database
    _before(database)
    for _ in range(2):
        upgrade(database)
        with database.read() as session:
            projects = {row.name: row for row in session.execute(select(Project)).scalars()}
            assert {name: row.place.location for name, row in projects.items()} == PLACES
            assert projects["text"].place.store_id == projects["vision"].place.store_id
            stores = session.execute(select(StoreRow).order_by(StoreRow.id)).scalars().all()
            assert [store.name for store in stores] == ["default", "default-2"]
            allowed = {
                name for name in PLACES if [row.name for row in backends_of(session, name)] == ["local"]
            }
            # An embedded service's own projects keep what they could do; elsewhere those that did it.
            assert allowed == (
                set(PLACES) if database.engine.dialect.name == "sqlite" else {"vision", "audio"}
            )
            (owner,) = session.execute(select(JobOwner)).scalars()
            assert owner.project == "vision"
            assert owner.job == digest_of("local", JobHandle("local", "7", IDENTITY))
        downgrade(database, "0006")
        with database.engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT name, store_url FROM projects")).all()
        assert dict(map(tuple, rows)) == PLACES
    upgrade(database)


def test_a_prefix_stays_part_of_the_url_on_the_way_back(empty_database: Database) -> None:
    database = empty_database
    _before(database)
    upgrade(database)
    with database.write() as session:
        session.get_one(Project, "text").placed.prefix = "teams/text"
    downgrade(database, "0006")
    with database.engine.connect() as connection:
        url = connection.execute(sa.text("SELECT store_url FROM projects WHERE name = 'text'")).scalar_one()
    assert url == "/data/runs/teams/text"
