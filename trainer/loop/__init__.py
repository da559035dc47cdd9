"""The training loop of a rank, and its watchdog."""
