"""Jobs that are processes of this machine."""
