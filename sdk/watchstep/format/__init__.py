"""Formats of objects on the store: layout, segments, documents and their statistics."""
