"""Artifacts, the data between stages, and the object storage that holds them."""
