"""Facilities of the machine and its network: processes, folders, HTTP."""
