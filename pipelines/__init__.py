"""Everything around the trainer: recipes, stages, artifacts in object storage, cost and tracking."""
