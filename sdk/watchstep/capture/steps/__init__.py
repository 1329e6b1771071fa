"""Steps: the records of a step, and the recorder that groups measurements into steps."""
