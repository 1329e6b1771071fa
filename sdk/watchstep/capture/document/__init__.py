"""Capture documents: a `CaptureConfig` as YAML or JSON, and its JSON schema."""
