"""``watchstep run``: recording an unmodified program."""
