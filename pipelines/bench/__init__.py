"""How fast whole optimizer steps are on this machine."""
