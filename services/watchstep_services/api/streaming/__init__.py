"""Events as they come, to whoever listens. The database is the truth: every process reads it, and tells none of the others."""
