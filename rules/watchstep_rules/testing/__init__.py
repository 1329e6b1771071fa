"""Tests of rules, as files: series or a recorded run on one side, the alerts that are expected on the other."""
