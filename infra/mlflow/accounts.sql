-- Accounts and runs are separate databases: MLflow migrates each by itself.
CREATE DATABASE accounts;
