"""What a run did and what it cost: the ledger, MLflow, the report."""
