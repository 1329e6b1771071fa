"""Whether the service would work as it is configured: every connection is tried, and what is wrong is said with its mend."""
