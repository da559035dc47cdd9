"""Several machines that work on one run: a head and its workers."""
