"""The GPT-2 trainer: tensors, shards and ranks. It knows no cloud, no MLflow and no bucket."""
