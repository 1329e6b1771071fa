"""The kinds of problems: what ``type`` of a problem+json says. A program may tell them apart by it; the texts are for people."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "urn:watchstep:problem:"


@dataclass(frozen=True)
class ProblemType:
    """A kind of problem.

    Attributes:
        status: of the answer.
        meaning: when it is given.
    """

    status: int
    meaning: str


TYPES: dict[str, ProblemType] = {
    "no-token": ProblemType(401, "No token, or one that is not known."),
    "not-allowed": ProblemType(403, "The token's role or project does not allow this."),
    "not-found": ProblemType(404, "There is no such thing, or none that the token may see."),
    "wrong-method": ProblemType(
        405, "The address does not take this method; `Allow` names those that it takes."
    ),
    "conflict": ProblemType(
        409, "It contradicts what is there, as an Idempotency-Key of another request does."
    ),
    "changed": ProblemType(412, "The thing is not the one that `If-Match` names."),
    "too-large": ProblemType(
        413, "The request is too large, or its answer would be: `mend` says how to ask for less."
    ),
    "too-long": ProblemType(414, "The address is too long."),
    "large-headers": ProblemType(431, "The headers are too many or too large."),
    "wrong-range": ProblemType(416, "The `Range` lies outside of the content."),
    "invalid": ProblemType(422, "A value cannot be used."),
    "too-many": ProblemType(
        429, "Too many requests, or too many queries at once; `Retry-After` says when to try again."
    ),
    "fault": ProblemType(500, "The service failed; its log says why."),
    "damaged": ProblemType(502, "What lies on the store is damaged, or no longer there."),
    "unavailable": ProblemType(503, "The database or the store does not answer."),
}

_BY_STATUS = {held.status: name for name, held in TYPES.items()}


def type_of(status: int) -> str:
    """The type of a problem with a status, as a URI."""
    return PREFIX + _BY_STATUS.get(status, "fault" if status >= 500 else "invalid")


def described(*statuses: int) -> dict[int, str]:
    """What some statuses mean."""
    return {status: TYPES[_BY_STATUS[status]].meaning for status in statuses}
