"""From recorded steps to objects on the store."""
