"""Encrypt addresses of webhooks with the key of the migrating service; without a key they are not changed.

Addresses in results of backtests are removed, and a downgrade does not restore them, because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.encrypted_addresses import EncryptedText, encrypted, opened

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("rule_configs", ("id",), "data"),
    ("project_rules", ("project", "name"), "data"),
    ("actions", ("id",), "payload"),
    ("backtests", ("id",), "rules"),
    ("receivers", ("project", "name"), "config"),
)
_RESULTS = (("backtest_results", ("backtest_id", "place"), "result"),)


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":  # otherwise the clear text remains in free pages
        op.get_bind().exec_driver_sql("PRAGMA secure_delete = ON")
    _change(encrypted)
    _change(lambda _, data: without_addresses(data), _RESULTS)
    _change_answers(EncryptedText().process_bind_param)


def downgrade() -> None:
    _change(opened)
    _change_answers(EncryptedText().process_result_value)


def _change(
    change: Callable[[sa.Dialect, Any], Any], columns: tuple[tuple[str, tuple[str, ...], str], ...] = _COLUMNS
) -> None:
    connection = op.get_bind()
    for name, keys, column in columns:
        table = sa.table(name, *(sa.column(key) for key in keys), sa.column(column, sa.JSON))
        found = sa.select(*(table.c[key] for key in keys), table.c[column])
        # All rows are read before one is changed, because a cursor over changing rows may return one twice.
        for part in connection.execute(found).fetchall():
            data = part[-1]
            changed = change(connection.dialect, data)
            if changed != data:
                row = sa.and_(*(table.c[key] == value for key, value in zip(keys, part, strict=False)))
                connection.execute(sa.update(table).where(row).values({column: changed}))


def _change_answers(change: Callable[[Any, sa.Dialect], Any]) -> None:
    connection = op.get_bind()
    table = sa.table("api_requests", sa.column("name"), sa.column("body"))
    for name, body in connection.execute(sa.select(table.c.name, table.c.body)).fetchall():
        changed = change(body, connection.dialect)
        if changed != body:
            connection.execute(sa.update(table).where(table.c.name == name).values(body=changed))
