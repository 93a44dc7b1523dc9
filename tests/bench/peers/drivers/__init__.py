"""One driver a peer, run in the peer's environment."""
