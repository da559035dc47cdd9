"""Where a run began, as a line."""

from pipelines.artifacts.manifest import Beginning
from pipelines.show.console import money

MOST_CHANGES = 4  # in a line


def beginning_text(began: Beginning) -> str:
    """branched from RUN at step 100, which had cost 1.23 dollars (not in this bill); changed: …"""
    if began.run is None:
        name, _, content = began.source.partition("@sha256:")
        return f"begins with the weights of {name}" + (f" (sha256 {content[:12]})" if content else "")
    at = "its last step" if began.step is None else f"step {began.step:,}"
    how = "branched from" if began.branched else "begins with the weights of"
    known = began.fingerprint is not None  # the other run is in the store
    cost = f", which had cost {money(began.usd, began.unpriced_hours)} dollars (not in this bill)" if known else ""
    return f"{how} {began.run} at {at}{cost}{changes_text(began)}"


def changes_text(began: Beginning) -> str:
    """The changed fields of a branch."""
    if began.changes is None:
        return ""
    fields = [f"{name} {there} → {here}" for name, (there, here) in began.changes.items()]
    more = f" and {len(fields) - MOST_CHANGES} more" if len(fields) > MOST_CHANGES else ""
    return f"; changed: {', '.join(fields[:MOST_CHANGES]) or 'nothing'}{more}"
