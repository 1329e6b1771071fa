"""Capture: select, measure, hand over, write and announce. Data flows in one direction."""
