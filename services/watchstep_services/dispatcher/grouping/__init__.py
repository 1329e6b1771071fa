"""From alerts to notifications: who is told, together with what, when, again when, and why somebody was not."""
