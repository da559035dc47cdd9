"""Prices, plans, and jobs of SkyPilot."""
