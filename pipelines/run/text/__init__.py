"""Text becomes token shards."""
