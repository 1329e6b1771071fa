"""Launching: how a program that knows nothing of Watchstep is started so that it records itself."""
