"""An OpenAI-compatible endpoint for a run, with its page."""
