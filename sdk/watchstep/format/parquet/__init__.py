"""Segments as Parquet: the form of compacted segments, and of live ones before schema 3."""
