"""Settings, events and telemetry: what every part of the service needs."""
