"""Progress of a running job for people: a live picture in a terminal or a notebook, or a line for each event."""
