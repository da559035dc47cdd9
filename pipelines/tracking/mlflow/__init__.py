"""MLflow as a mirror of what runs record: a tracker that cannot fail a run, a shipper, and the journal."""
