"""What happens to a run after its end: compacted, kept for a while, and gone where a project's policy says so."""
