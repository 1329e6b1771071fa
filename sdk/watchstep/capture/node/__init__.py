"""One writer for a node: its ranks meet, one of them leads, the others hand over to it. Decision 013 says why it is so."""
