"""The process that claims and runs jobs."""
