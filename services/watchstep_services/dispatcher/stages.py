"""How far a stop came: the stage of its action.

    ASK → ASKED → TERMINATING → TERMINATED → KILLING → KILLED

A stage that ends in -ING is committed before its signal is sent: whoever finds it sends the signal again, or finds the job gone.
"""

ASK, ASKED, TERMINATED, KILLED, UNCONFIRMED, TERMINATING, KILLING = 0, 1, 2, 3, 4, 5, 6
"""Not begun; all workers asked; the job asked to end; killed; asked, and nobody can say that anything came of it; about to be asked
to end; about to be killed."""

INTENDED = {TERMINATING: TERMINATED, KILLING: KILLED}
"""Of a stage whose signal may have been sent: the stage that it comes to."""
