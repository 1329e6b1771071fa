"""The service, as a recorder finds it, registers with it, and tells it of segments."""
