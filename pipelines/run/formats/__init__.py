"""Hugging Face's format, the one that every export has."""
