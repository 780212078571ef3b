"""The parts of scripts/bench-peers."""
