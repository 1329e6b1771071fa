"""The store, a whole run and its stop on servers of S3, Azure Blob Storage and Google Cloud Storage."""
