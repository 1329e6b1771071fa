"""What recording costs trainings with JAX, Keras and TensorFlow: `python -m benchmarks.frameworks [--quick] [--json FILE]`."""
