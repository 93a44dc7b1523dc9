"""Benchmarks, on a PostgreSQL of their own with a real disk: `python -m tests.bench`, or one alone (`….floors`)."""
