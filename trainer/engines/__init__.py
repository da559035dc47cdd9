"""Engines: implementations of the same update behind one interface (engine.py); choice.py chooses one."""
