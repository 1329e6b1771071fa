"""The end of a recording for every way in which its process can end."""
