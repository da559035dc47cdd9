"""Small things that several tests of rented machines need."""

import threading

from servers import free_ports

from trainer.errors import Interrupted
from trainer.process import StopSignal

KEYS = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a very secret key"}


def closed_port() -> str:
    """The address of a server that does not exist."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


class Signal(StopSignal):
    """A stop signal that leaves pytest's signal handlers alone."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def ask(self, reason: str, ending: type[Interrupted] = Interrupted) -> None:
        super().ask(reason, ending)
        self.heard.set()
