"""What several rules compute from rows, or remember of them."""
