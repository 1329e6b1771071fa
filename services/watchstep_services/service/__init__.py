"""The context of the service: its settings, its database, and the caches of its workers."""
