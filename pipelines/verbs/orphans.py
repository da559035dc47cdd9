"""`skytrain orphans`: machines that cost money for no live run."""

import json
import sys
import time
from dataclasses import asdict

from pipelines.verbs.options import Json, StoreUri, store_uri


def orphans(store: StoreUri = None, as_json: Json = False) -> None:
    """List machines that still cost money and that no live run uses: exit 0 if there are none, 1 if there are."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud.control import find_orphans
    from pipelines.cloud.skypilot import reach_api_server
    from pipelines.show.console import say
    from pipelines.show.findings import print_note_on_stderr

    opened = open_store(store_uri(store))
    reach_api_server(print_note_on_stderr)
    found = list(find_orphans(opened, time.time()))
    if as_json:
        print(json.dumps([asdict(orphan) for orphan in found]))
    else:
        for orphan in found:
            say(f"{orphan.what}: {orphan.why}; {orphan.remedy} removes it")
    sys.exit(bool(found))
