"""The verbs for rented machines, added to those of pipelines/cli.py. Heavy imports wait inside them, as there."""

import json
import sys
from dataclasses import asdict

import typer

from pipelines.options import Json

cloud_app = typer.Typer()


@cloud_app.command()
def doctor(as_json: Json = False) -> None:
    """Look at what is installed, and say how to mend what is broken: exit 0 fine, 2 if something needed is not."""
    from pipelines.cloud.doctor import installed

    findings = list(installed())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.state:8} {finding.what:10} {finding.seen}  {finding.remedy}")
    sys.exit(2 if any(finding.state == "broken" for finding in findings) else 0)
