"""The mirror of a run in MLflow, a process of its own."""
