"""The ``watchstep`` commands beside ``run``."""
