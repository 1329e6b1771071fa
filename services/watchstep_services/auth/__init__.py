"""Tokens and roles."""
