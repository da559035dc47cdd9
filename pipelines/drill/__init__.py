"""A run is struck again and again, and what it leaves is compared with what an undisturbed one leaves."""
