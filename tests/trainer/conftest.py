"""Fixtures of all tests of the trainer."""

from trainer_runs import _one_thread, data, endings, runner

__all__ = ["_one_thread", "data", "endings", "runner"]
