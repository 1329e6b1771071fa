"""How fast the service is, what it costs, and how that grows."""
