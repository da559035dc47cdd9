"""MLflow as a mirror of the store: what a run is there, the process that sends it, and its settings."""
