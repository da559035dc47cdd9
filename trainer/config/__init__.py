"""The configuration of a training: its sections, their checks, errors, and the amounts that follow."""
