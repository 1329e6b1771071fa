"""Receivers: who is told of alerts, how, and by which route."""
