"""Warnings, such as those about a store that does not answer, on stderr."""

import logging


def make_warnings_printable() -> None:
    """Replace control characters in warnings from now on: they may come from names in a store."""
    if logging.lastResort:  # the handler of all that have no other
        logging.lastResort.setFormatter(PrintableFormatter())


class PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from pipelines.user.show.console import printable  # brings rich, which --help does not need

        return printable(super().format(record))
