"""Token shards: their format, the order in which a run reads them, and batches."""
