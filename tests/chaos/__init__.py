"""The fault suite: real processes on real servers, broken on purpose, and a count of what became of every job."""
