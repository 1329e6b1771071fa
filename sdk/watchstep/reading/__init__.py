"""Reading a run, while it goes on and after it: tensors, steps, figures, losses."""
