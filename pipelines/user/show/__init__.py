"""All that is printed and drawn."""
