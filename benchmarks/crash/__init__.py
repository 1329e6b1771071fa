"""Nothing lost: production's processes are killed at named points, again and again, and every stop still happens once."""
