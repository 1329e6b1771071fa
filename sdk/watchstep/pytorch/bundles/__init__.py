"""Bundles: one training step as it was before its update, with everything that computes it again."""
