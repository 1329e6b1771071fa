"""What the default rules find in published training faults, and how often they cry wolf on healthy runs."""
