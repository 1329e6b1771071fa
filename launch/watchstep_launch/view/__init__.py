"""What people see while a job goes on: a picture that changes, in a terminal or a notebook, or a line for each event."""
