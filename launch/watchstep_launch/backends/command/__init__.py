"""Jobs by the user's own commands."""
