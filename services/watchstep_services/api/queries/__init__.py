"""Queries of recorded runs, limited in time, memory and number. The SDK's own code reads the data."""
