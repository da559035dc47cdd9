"""`skytrain orphans`: machines that cost money for no live run."""

import json
import os
import sys
import time
from dataclasses import asdict

from pipelines.verbs.options import Json, StoreUri, store_uri


def orphans(store: StoreUri = None, as_json: Json = False) -> None:
    """List machines that still cost money and that no live run uses: exit 0 if there are none, 1 if there are."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")  # without a store, SkyPilot's own record names them too
    from pipelines.cloud.control import RunsOfStores, find_orphans
    from pipelines.cloud.skypilot import reach_api_server
    from pipelines.show.findings import print_note_on_stderr
    from pipelines.show.status import print_orphans

    runs = RunsOfStores(store_uri(store), print_note_on_stderr)
    if runs.failure:
        print_note_on_stderr(f"the store can't be read, so SkyPilot's record alone decides: {runs.failure}")
    reach_api_server(print_note_on_stderr)
    found = list(find_orphans(runs, time.time()))
    if as_json:
        print(json.dumps([asdict(orphan) for orphan in found]))
    else:
        print_orphans(found)
    sys.exit(bool(found))
