"""The outbox: does what events cause, once each, and records every try."""
