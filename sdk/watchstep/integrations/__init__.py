"""Recording what other frameworks train, and sweeps that give a bad trial up: one module for each, loaded by who uses it."""
