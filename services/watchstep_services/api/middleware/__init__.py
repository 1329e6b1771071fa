"""What every request passes: connections, limits, access, idempotency."""
