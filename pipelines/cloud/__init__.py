"""Rented machines: prices and plans, launches through SkyPilot, and control of launched runs."""
