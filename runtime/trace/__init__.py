"""What a run did: statistics and routing traces."""
