"""Figures of the process and the machine: sampled beside training, recorded with its steps."""
