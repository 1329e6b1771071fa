"""Sandbox of user-defined rules: runs them in a child process that can access only the data that it receives."""
