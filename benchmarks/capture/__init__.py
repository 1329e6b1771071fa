"""What recording costs: `python -m benchmarks.capture [--quick] [--json FILE]`."""
