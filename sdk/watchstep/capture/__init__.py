"""Capture: select → measure → hand over → write → announce. Data flows one way."""
