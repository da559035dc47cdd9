"""The records of runs and their cost: ledger, accounts, reports, MLflow."""
