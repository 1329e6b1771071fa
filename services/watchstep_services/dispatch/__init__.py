"""Actions of the outbox: stops, webhooks and notifications."""
