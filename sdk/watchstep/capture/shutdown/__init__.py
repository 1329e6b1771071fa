"""How a recording ends, however its process ends."""
