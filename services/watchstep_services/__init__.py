"""The Watchstep service: evaluates runs, keeps alerts, stops jobs."""
