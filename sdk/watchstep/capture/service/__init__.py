"""Locating the service, registration and announcements of segments."""
