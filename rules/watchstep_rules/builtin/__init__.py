"""The built-in rules, one per module, by what they judge."""
