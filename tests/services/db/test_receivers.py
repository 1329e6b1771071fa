from __future__ import annotations

import sqlalchemy as sa

from watchstep_services.db.engine import Database
from watchstep_services.db.models import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.db.schema import downgrade, upgrade


def test_receivers_go_down_and_up_again_with_what_they_hold(database: Database) -> None:
    with database.write() as session:
        session.add(
            ReceiverRow(
                project="vision",
                name="hook",
                kind="webhook",
                config={"kind": "webhook"},
                written_ns=1,
                written_by="x",
            )
        )
        session.flush()
        session.add(ReceiverSecret(project="vision", name="hook", field="secret", encrypted="encrypted"))
        session.add(RoutingTree(project="vision", tree={"receiver": "hook"}, written_ns=1, written_by="x"))
    downgrade(database, "0008")
    assert "receivers" not in sa.inspect(database.engine).get_table_names()
    upgrade(database)
    with database.read() as session:
        assert session.execute(sa.select(ReceiverRow)).all() == []
