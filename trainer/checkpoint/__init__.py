"""Checkpoints: saved in the background, committed by one object, verified when loaded."""
