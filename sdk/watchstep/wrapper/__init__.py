"""``watchstep run``: recording a program without changes to it."""
