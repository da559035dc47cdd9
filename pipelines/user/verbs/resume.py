"""`skytrain resume`: launch a run again as it was launched before."""

from dataclasses import replace
from typing import Annotated

import typer

from pipelines.user.verbs.launch import Yes, submit_after_checks
from pipelines.user.verbs.options import BudgetUsd, RunName, StoreUri, named_run


def resume(
    run: RunName,
    store: StoreUri = None,
    budget: BudgetUsd = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Pass a secret that its launch named; can be repeated."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Launch a stopped or ended run again with the options of its last launch."""
    from pipelines.run.stage import planned
    from pipelines.store.secrets import SECRETS
    from pipelines.store.stop_request import read_stop_request
    from pipelines.user.cloud.launch import planned_launch
    from pipelines.user.cloud.request import last_launch, secrets_from_shell
    from pipelines.user.show.console import say
    from trainer.config.errors import UserError

    record, opened = named_run(run, store)
    before = last_launch(opened, record.run)
    if before is None:
        raise UserError(f"resume: {record.run} was never launched; skytrain run run:{record.run} continues it here")
    request = before.request if budget is None else replace(before.request, budget=budget)
    # A writer of the store may name secrets and an image: others than the usual ones go nowhere without a word here.
    if unnamed := sorted({*before.secrets} - {*SECRETS, *(secret or [])}):
        raise UserError(
            f"resume: the record of its launch in {opened.uri} names the secret {unnamed[0]}; if you named it then, "
            f"add --secret {unnamed[0]}"
        )
    secrets = secrets_from_shell(name for name in before.secrets if not name.endswith("_SESSION_TOKEN"))
    names = ", ".join(secrets) or "none"
    settings = ", ".join(f"{name}={value}" for name, value in request.variables.items()) or "none"
    say(f"as launched before: image {request.image}; variables: {settings}; secrets: {names}")
    loaded, plans = planned(f"run:{record.run}", [], opened)
    stopped = read_stop_request(opened, record.run)

    if stopped:
        say(f"{record.run} was stopped by {stopped}")
    prepared = planned_launch(request, loaded, plans, opened, secrets)
    if prepared is None:
        say(f"{request.run}: every stage is in {opened.uri} already; nothing to launch")
    else:
        submit_after_checks(prepared, lambda question: yes or typer.confirm(question))
