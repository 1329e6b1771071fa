"""Full tensors of chosen steps."""
