"""Reading a run during and after the recording: tensors, steps, figures, losses."""
