"""What a run is: the schema of a recipe, its sources and the project's settings."""
