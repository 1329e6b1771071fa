"""Full tensors: of collections, given by the program, and snapshots."""
