"""Scores of lm-eval's tasks."""
