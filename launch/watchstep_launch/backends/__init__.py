"""What runs jobs: one module or package for each kind."""
