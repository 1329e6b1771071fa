"""From segments to alerts: the heart of the service."""
