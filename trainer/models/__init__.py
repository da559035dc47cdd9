"""The model families: each has its section of a recipe (`NAME.py`, without torch), and its plain module
(`NAME_module.py`), the reference, which also runs on a CPU. `trainer/models/family.py` finds them by name."""
