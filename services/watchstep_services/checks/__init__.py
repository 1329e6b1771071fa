"""Whether the service would work as it is configured: every connection is tried, and what is wrong is reported with a hint."""
