"""The Starlette service in front of the queue."""
