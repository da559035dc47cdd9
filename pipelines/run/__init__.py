"""One run on its nodes: the pipeline, its stages, the ranks, and text that becomes shards."""
