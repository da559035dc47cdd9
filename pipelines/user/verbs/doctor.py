"""`skytrain doctor`: checks of this machine."""

import json
import os
import sys
from dataclasses import asdict

from pipelines.user.verbs.options import Json, StoreUri, home, store_uri


def doctor(store: StoreUri = None, as_json: Json = False) -> None:
    """Check GPUs, store and servers; exit with 2 if something is broken."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    sys.exit(0 if print_examination(store_uri(store), as_json) else 2)


def print_examination(uri: str, as_json: bool = False) -> bool:
    """Print the checks of this machine and a store. False if something is broken."""
    from pipelines.user.cloud.checks import examine
    from pipelines.user.show.findings import print_finding

    findings = list(examine(home(), uri, dict(os.environ)))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print_finding(finding)
    return all(finding.state != "broken" for finding in findings)
