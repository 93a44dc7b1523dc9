"""Side by side with other job queues, each in an environment of its own: `python -m tests.bench.peers`."""
