"""One writer for a node: its ranks meet, one of them leads, the others hand over their blocks to it. See decision 013."""
