"""Jobs of Amazon SageMaker."""
