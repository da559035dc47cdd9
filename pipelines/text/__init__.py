"""Text sources, tokenizers, and the parts of a text as token shards."""
