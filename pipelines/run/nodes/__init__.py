"""The ranks of a node, and the nodes of a run."""
