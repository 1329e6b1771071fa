"""Rule files: YAML, checks, presets and the JSON schema."""
