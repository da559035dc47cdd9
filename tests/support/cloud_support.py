"""Small things that several tests of rented machines need."""

from servers import free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a very secret key"}


def closed_port() -> str:
    """The address of a server that does not exist."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"
