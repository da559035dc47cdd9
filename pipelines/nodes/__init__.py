"""Several machines that work on one run."""
