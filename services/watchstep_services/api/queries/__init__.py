"""Questions to what runs recorded: bounded in time, memory and number, and read by the SDK's own code."""
