"""Groups of alerts, silences, and the receivers of a project."""
