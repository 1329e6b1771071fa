"""What the machine and its network provide: processes, folders, HTTP."""
