"""The embedded service: all parts of the service in one process."""
