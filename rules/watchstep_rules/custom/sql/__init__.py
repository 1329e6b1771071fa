"""Rules and queries in SQL."""
