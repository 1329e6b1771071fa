"""Who does the work, and when: threads in one process, or Celery."""
