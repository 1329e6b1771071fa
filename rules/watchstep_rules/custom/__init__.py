"""Rules that users write, in Python and SQL, and the sandbox that runs them."""
