"""Rented machines: prices and plans, launching through SkyPilot, and what is done with a run from afar."""
