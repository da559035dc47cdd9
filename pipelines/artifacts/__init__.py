"""What passes between stages, and the object storage it lives in."""
