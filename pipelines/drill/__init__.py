"""A drill injects faults into a run and compares its results with those of an undisturbed run."""
