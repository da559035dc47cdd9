"""MLflow as a mirror of the ledger: a tracker that cannot fail a run, a shipper, and the journal."""
