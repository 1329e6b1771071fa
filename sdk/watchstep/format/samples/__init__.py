"""The samples of steps, and lists of samples to leave out."""
