"""The bill of a run: its cost by stage, phase and market, and a row for each attempt."""

import time

from rich.table import Table

from pipelines.run.runs import Run
from pipelines.store.account import AttemptAccount, TrafficCost, market_of
from pipelines.store.traffic import GB
from pipelines.user.show.console import cell, console, duration, money


def over_budget(usd: float, budget: float) -> str:
    return f"OVER ITS BUDGET: ${usd:,.4g} of ${budget:,.4g}"


def print_bill(run: Run, budget: float | None = None) -> None:
    """Print the costs of one run, their prices, and the losses."""
    out, account, unreleased = console(), run.account, len(run.unreleased)
    if budget and account.total.usd > budget:
        out.print(f"[bold red]{over_budget(account.total.usd, budget)}[/]")
    if unreleased:
        out.print(
            f"without the last minutes of {unreleased} machine(s), from the last heartbeat to the release; "
            f"`skytrain status {run.name}` gets them, with the API server of that launch and SkyPilot's "
            "controller up"
        )
    if run.unattempted:
        seconds = sum(one.until - one.since for one in run.unattempted)
        out.print(
            f"without {len(run.unattempted)} cluster(s) on which nothing ran, in SkyPilot's record for at most "
            f"{duration(seconds)}: machines that failed to start, or that found the run stopped"
        )
    for title, costs in (("stage", account.by_stage), ("phase", account.by_phase), ("market", account.by_market)):
        table = Table(title, "time", "dollars", box=None, pad_edge=False)
        for name, cost in sorted(costs.items(), key=lambda item: -item[1].hours):
            table.add_row(cell(name), duration(3600 * cost.hours), money(cost.usd, cost.unpriced_hours))
        out.print(table)
        out.print()
    heads = ("attempt", "state", "on", "started (UTC)", "time", "price an hour", "dollars", "steps", "saved", "redone")
    table = Table(*heads, box=None, pad_edge=False)
    for attempt in account.attempts:
        if not attempt.waited:  # a launch that waits for spot does so a hundred times a day
            table.add_row(*map(cell, attempt_row(attempt)))
    out.print(table)
    out.print()
    lines = []
    if account.goodput is not None:
        waits = " without waits for spot" if account.waits.hours else ""
        lines.append(f"goodput {account.goodput:.1%}: training, each step counted once, of all billed time{waits}")
    if account.waits.hours:
        waited = money(account.waits.usd, account.waits.unpriced_hours)
        lines.append(f"{waited} dollars in {duration(3600 * account.waits.hours)} of waits for spot, in no row above")
    if account.usd_per_billion_tokens:
        lines.append(f"{account.usd_per_billion_tokens:,.2f} dollars per billion tokens")
    if account.traffic != TrafficCost():
        lines.append(traffic_text(account.traffic))
    if account.interruptions.hours:
        lost = money(account.interruptions.usd, account.interruptions.unpriced_hours)
        lines.append(f"{lost} dollars lost to interruptions: repeated work, and the restarts")
    if account.savings_usd is not None:
        lines.append(f"{account.savings_usd:.2f} dollars saved against on-demand prices")
    if account.deaths:
        lines.append(
            f"{account.deaths} attempt(s) crashed without a last heartbeat: up to {account.unseen_usd:.2f} dollars "
            f"({account.unseen_seconds:.0f} s) may be missing from the bill"
        )
    for a in (a for a in account.attempts if a.progress.clock_jump):
        jump = duration(abs(a.progress.clock_jump or 0.0))
        lines.append(
            f"the clock of {a.process.host} jumped by {jump} during {a.stage} {a.attempt}; "
            "the bill goes by its boot clock"
        )
    for line in lines:
        out.print(cell(line))


def traffic_text(traffic: TrafficCost) -> str:
    """The bytes and requests between the machines and the store, and their price."""
    text = f"{traffic.usd:,.2f} dollars of traffic" if traffic.unpriced_bytes == 0 else "traffic"
    text += f": {traffic.sent_bytes / GB:,.2f} GB to the store, {traffic.received_bytes / GB:,.2f} GB from it"
    text += f", {traffic.requests:,} requests" if traffic.requests else ""
    if traffic.unpriced_bytes and traffic.usd:
        return f"{text}; {traffic.usd:,.2f} dollars, without {traffic.unpriced_bytes / GB:,.2f} GB of unknown price"
    return f"{text}; their price is unknown" if traffic.unpriced_bytes else text


def attempt_row(a: AttemptAccount) -> list[str]:
    return [
        f"{a.stage} {a.attempt}",
        a.state + (f" ({a.progress.notice})" if a.progress.notice else ""),
        (f"{a.nodes} x " if a.nodes > 1 else "") + f"{a.machine.instance or a.process.host}, {market_of(a.machine)}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(a.started)),
        duration(sum(a.phases.values())),
        f"{'unknown' if a.price_per_hour is None else f'{a.price_per_hour:.2f}'} ({a.price_source})",
        money(a.bill.usd, a.bill.unpriced_hours),
        *(str(steps) if a.steps_done else "" for steps in (a.steps_done, a.steps_kept, a.steps_redone)),
    ]
