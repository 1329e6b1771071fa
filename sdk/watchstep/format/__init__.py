"""Formats of what is on the store: layout, segments, documents, and the statistics that they hold."""
