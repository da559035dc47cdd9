"""Text sources and tokenizers."""
