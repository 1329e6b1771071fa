"""The ring of steps in device memory: updates inside of scans, whose outputs cannot leave the program."""
