"""Jobs: start them, ask how they are, stop them."""
