"""The service's database: the truth about runs, alerts, events and actions."""
