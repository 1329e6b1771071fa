"""The ``watchstep`` commands, except ``run``."""
