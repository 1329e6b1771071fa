"""Names, expiry and revocation of tokens."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BEFORE = ("sha256", "role", "project", "created_ns")


def upgrade() -> None:
    """Keep existing tokens valid; their id is the start of their hash."""
    rows = _read(sa.text(f"SELECT {', '.join(_BEFORE)} FROM tokens"))  # noqa: S608 - of fixed words
    op.drop_table("tokens")
    tokens = op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=128), nullable=True),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.String(length=256), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked_by", sa.String(length=256), nullable=False),
        sa.Column("last_used_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_tokens_project"), "tokens", ["project"], unique=False)
    added = {"name": "", "created_by": "", "revoked_by": ""}
    op.bulk_insert(tokens, [{**row, **added, "id": row["sha256"][:16]} for row in rows])


def downgrade() -> None:
    """Drop tokens that are revoked or expire, because the earlier tables would treat them as valid for ever."""
    rows = _read(
        sa.text(
            f"SELECT {', '.join(_BEFORE)} FROM tokens WHERE revoked_ns IS NULL AND expires_ns IS NULL"  # noqa: S608
        )
    )
    op.drop_index(op.f("ix_tokens_project"), table_name="tokens")
    op.drop_table("tokens")
    tokens = op.create_table(
        "tokens",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=128), nullable=True),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.bulk_insert(tokens, rows)


def _read(statement: sa.TextClause) -> list[dict[str, Any]]:
    return [dict(row) for row in op.get_bind().execute(statement).mappings()]
