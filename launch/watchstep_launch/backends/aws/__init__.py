"""Jobs of AWS Batch and Amazon SageMaker."""
