"""Data loaders: the batches that they yield, their samples, and samplers that leave samples out."""
