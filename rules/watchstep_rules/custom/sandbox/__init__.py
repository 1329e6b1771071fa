"""Rules that are programs of others: run in a child process that can reach nothing but what it is sent."""
