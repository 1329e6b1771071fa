"""Stores of objects: buckets and local folders."""
