"""Decisions before an update: common stops of all ranks, and what happens with a non-finite update."""
