"""How far a stop came: the stage of its action."""

ASK, ASKED, TERMINATED, KILLED, UNCONFIRMED = 0, 1, 2, 3, 4
"""Not begun; all workers asked; the job asked to end; killed; asked, and nobody can say that anything came of it."""
