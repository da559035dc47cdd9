"""The speed of whole optimizer steps on this machine, and the measured figures of the project."""
