"""Random requests to every operation of the API, in process: ``python -m benchmarks.fuzz_api [--examples N] [--json FILE]``.

What is answered must be in the OpenAPI document, and never a fault of the server. On SQLite, and on PostgreSQL by ``--postgresql``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Figure, Report, arguments
from tests.services.api.fuzzing import Tally, fuzz, prepared
from tests.services.driving import Driven, make_service
from tests.services.postgres import running_postgres
from watchstep.store.store import Store
from watchstep_services.auth import create_token
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade


@contextmanager
def database_url(folder: Path, *, postgresql: bool) -> Iterator[str]:
    """An empty database."""
    if not postgresql:
        yield f"sqlite:///{folder / 'service.sqlite'}"
        return
    with running_postgres() as server, server.new_database() as url:
        yield url


def main() -> None:
    """Fuzz, and say how much was done."""
    parser = arguments("Random requests to every operation of the API, against its OpenAPI document.")
    parser.add_argument(
        "--examples", type=int, default=25, help="requests for each operation, by and against the document"
    )
    parser.add_argument("--seed", type=int, default=1, help="another one makes other requests")
    parser.add_argument("--postgresql", action="store_true", help="on PostgreSQL in place of SQLite")
    chosen = parser.parse_args()
    examples = 2 if chosen.quick else chosen.examples
    with tempfile.TemporaryDirectory(prefix="ws-fuzz-") as name:
        folder = Path(name)
        with database_url(folder, postgresql=chosen.postgresql) as url:
            tally = run(folder, url, examples, chosen.seed)
    report = Report("The API under random requests", quick=chosen.quick, packages=("fastapi", "schemathesis"))
    report.add("requests", Figure(tally.requests, "requests", note=f"to {tally.operations} operations"))
    server_errors = sum(
        number for status, number in tally.statuses.items() if status >= 500 and status != 502
    )
    report.add("server errors", Figure(server_errors, "answers", 0))
    report.add("answers that the document does not say", Figure(len(tally.faults), "answers", 0))
    report.remark(
        "statuses: " + ", ".join(f"{status} {number}" for status, number in sorted(tally.statuses.items()))
    )
    for fault in tally.faults[:20]:
        report.remark(fault)
    report.finish(chosen.json)


def run(folder: Path, url: str, examples: int, number: int) -> Tally:
    """Fuzz a service on a fresh store and an empty database."""
    (folder / "store").mkdir()
    store = Store.open(folder / "store")
    database = open_database(url)
    try:
        upgrade(database)
        driven = Driven(
            make_service(
                database, store, requests_per_minute=0, recordings_per_minute=0, failures_per_minute=0
            )
        )
        app = prepared(driven, store)
        return fuzz(app, create_token(database, "admin"), examples, number)
    finally:
        database.close()


if __name__ == "__main__":
    main()
