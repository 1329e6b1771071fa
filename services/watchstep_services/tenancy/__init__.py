"""Who may reach what: registered stores and backends, the projects that use them, and the jobs that are theirs."""
