"""``watchstep audit``: run a program twice, and report what is not deterministic."""
