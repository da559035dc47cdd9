"""Evaluation of a model: validation loss, HellaSwag, CORE and samples."""
