"""Claims of whole Parquet files."""

from __future__ import annotations

from watchstep.format.parquet.claims import Claims, claims_of, read_footer


def read_claims(data: bytes) -> Claims:
    """The claims of all columns of a file."""
    return claims_of(data, read_footer(data))
