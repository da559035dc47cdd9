"""The completions endpoint of `skytrain serve`: requests, their turns, and the application."""
