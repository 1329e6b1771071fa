"""A run's journal as it lies on the store."""

from __future__ import annotations

import re
from collections.abc import Iterator

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import journal
from watchstep.format.journal import JournalEvaluation
from watchstep.format.layout import journal_part, journal_prefix
from watchstep.store.store import Store

_PART = re.compile(r"([0-9]{10})\.json")


def count_parts(store: Store, attempt: str) -> int:
    """How many parts the journal of an attempt has, from the first on; 0 where no service judged it.

    Args:
        store: seen from the run.
        attempt: whose.

    Raises:
        StoreError: the store cannot be read.
    """
    prefix = journal_prefix(attempt)
    names = (_PART.fullmatch(entry.key.removeprefix(prefix)) for entry in store.entries(prefix))
    known = {int(found[1]) for found in names if found}
    count = 0
    while count in known:
        count += 1
    return count


def read_journal(store: Store, attempt: str) -> Iterator[JournalEvaluation]:
    """The evaluations of an attempt in order; one part is held at a time.

    Raises:
        FormatError: a part is damaged, of a later version, or does not follow the one before.
        StoreError: the store cannot be read.
    """
    before: JournalEvaluation | None = None
    for number in range(count_parts(store, attempt)):
        part = read_part(store, attempt, number)
        if before is not None:
            journal.check_order([before, part.evaluations[0]], journal_part(attempt, number))
        before = part.evaluations[-1]
        yield from part.evaluations


def read_part(store: Store, attempt: str, number: int) -> journal.JournalPart:
    """One part of a journal.

    Raises:
        FormatError: it is gone, damaged, or belongs elsewhere.
        StoreError: the store cannot be read.
    """
    key = journal_part(attempt, number)
    try:
        part = journal.decode(store.get(key, limit=journal.MAX_BYTES), key)
    except NotFoundError as error:
        raise FormatError(error.what, "the run can still be judged without its journal") from error
    if (part.attempt, part.number) != (attempt, number):
        raise FormatError(
            f"{key}: part {part.number} of {part.attempt}", "the run can still be judged without its journal"
        )
    return part
