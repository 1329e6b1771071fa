"""Pictures of runs, tensors and alerts, and the report of a run."""
