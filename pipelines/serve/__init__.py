"""The completions endpoint of `skytrain serve`, and its page."""
