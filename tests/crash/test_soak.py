"""Five minutes of the soak, with disturbances of every kind that this machine allows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from disturbances import possible_kinds
from servers import Radosgw, S3Account
from soak import soak

from pipelines.store.s3_store import S3Store


@pytest.mark.slow
def test_a_run_that_everything_disturbs_ends_like_an_undisturbed_one(
    tmp_path: Path, request: pytest.FixtureRequest, fresh_s3_store: Callable[[S3Account], S3Store]
) -> None:
    account = request.getfixturevalue("moto_server" if Radosgw.missing_programs() else "s3_server")
    assert soak(1, 5.0, possible_kinds(), tmp_path, fresh_s3_store(account)) == []
