"""Rule configs: rules with parameters, scope, timing and actions, as data."""
