"""Fixtures of many tests: sample data, a finished run, and S3 servers that start once a session."""

import gc
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from once import once
from pipeline_runs import FOLDER_NAME, PRICE, Project, ranks
from servers import (
    FOREIGN_AWS_VARIABLES,
    MlflowServer,
    MotoServer,
    Radosgw,
    S3Account,
    started_once,
    stop_all,
)

from pipelines.store.s3_store import S3Store
from trainer.base.store import LocalStore

if TYPE_CHECKING:
    from pipelines.run.stage import Work

# Without a GPU, Triton's kernels run in its interpreter. The variable has to be set before the first import of triton;
# child processes inherit it. The check of the device file spares most tests the import of torch.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As after `source .venv/bin/activate`: messages then name commands without a path.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# No test times anything, and a fixture serves all examples of a test.
slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
settings.load_profile("untimed")

# pytest-xdist gives its workers a terminal's width, but the output of a test goes to no terminal.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates `-m "not slow"`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test on radosgw as slow: its start takes 20 s. `make test` uses moto instead."""
    for item in items:
        if "radosgw" in getattr(item, "fixturenames", ()) or "radosgw" in item.name:
            item.add_marker(pytest.mark.slow)
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or takes long without one"))
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The items in such an order that each worker, which gets as many of them in turn, begins with slow modules: an
    idle worker steals from the end of a part. The longest test has no slow one behind it."""
    slow: dict[str, list[pytest.Item]] = {"test_cluster": [], "test_soak": [], "test_image": []}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault(item.path.stem, []).append(item)
    longest, *modules = slow.values()
    others = max(1, workers - 1)
    parts = [longest, *([item for module in modules[n::others] for item in module] for n in range(others))]
    fast = iter([item for item in items if not item.get_closest_marker("slow")])
    for part in parts:
        part += islice(fast, max(0, len(items) // workers - len(part)))
    return [*chain(*parts), *fast]


def pytest_unconfigure(config: pytest.Config) -> None:
    """At the end of the session, stop the servers that its workers shared."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory and not hasattr(config, "workerinput"):
        stop_all(factory.getbasetemp())


@pytest.fixture
def no_garbage() -> None:
    """For tests that reach the limit of recursion: a finalizer that runs there fails, and pytest blames the test."""
    gc.collect()


@pytest.fixture
def shared_data() -> Path:
    """Sample texts, HellaSwag and tokenizer files; they are too big for the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return SHARED_DATA


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def _no_metadata_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ignore the metadata service of their machine, which may belong to a cloud."""
    monkeypatch.setenv("SKYTRAIN_NOTICE", "off")


@pytest.fixture(autouse=True)
def _tokenizers_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    if (SHARED_DATA / "tiktoken").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken"))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, the same one in all workers."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def undisturbed(shared_folder: Path) -> Callable[[int], Project]:
    """Makes a finished run of `tiny.yaml` with the given number of training processes, once for all workers.

    A test that changes anything in it takes a copy.
    """

    def finished(processes: int) -> Project:
        def run(folder: Path) -> None:
            command = ("run", "tiny.yaml", "--price-per-hour", str(PRICE))
            Project(folder / FOLDER_NAME).run(*command, *ranks(processes))

        return Project(once(shared_folder / f"undisturbed-{processes}", run) / FOLDER_NAME)

    return finished


@pytest.fixture(scope="session")
def radosgw(shared_folder: Path) -> Radosgw:
    """A real S3 server, the only one of the session: radosgw in front of a one-node Ceph."""
    if Radosgw.missing_programs():
        pytest.skip("needs radosgw, ceph-mon, ceph-osd, ceph-common (apt)")
    return started_once(shared_folder, "radosgw", Radosgw)


@pytest.fixture(scope="session")
def s3_server(radosgw: Radosgw) -> S3Account:
    """The account of the server's owner, with all rights."""
    return radosgw.account


@pytest.fixture(scope="session")
def moto_server(shared_folder: Path) -> S3Account:
    """moto's imitation of S3. It starts in a second, but it proves nothing about races and permissions."""
    pytest.importorskip("moto", reason="needs moto[server] (pip)")
    return started_once(shared_folder, "moto", MotoServer).account


@pytest.fixture(scope="session")
def mlflow_server(shared_folder: Path) -> str:
    """The URI of the session's tracking server. Its runs have names of other tests: use one's own experiment."""
    return started_once(shared_folder, "mlflow", MlflowServer).uri


@pytest.fixture
def fresh_s3_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Account], S3Store]:
    """Makes a store in a new bucket and sets the AWS variables of this process and its children."""

    def on(account: S3Account) -> S3Store:
        for name in FOREIGN_AWS_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in account.environment.items():
            monkeypatch.setenv(name, value)
        store = S3Store(f"test-{uuid.uuid4().hex[:16]}", "some/prefix", time_limit_s=30)
        store._client.create_bucket(Bucket=store.bucket)
        return store

    return on


@pytest.fixture
def s3_store(s3_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store]) -> S3Store:
    """A store in a new bucket of the real server; `s3_store.uri` works in child processes too."""
    return fresh_s3_store(s3_server)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Callable[[str], Work]":
    """The work of a stage of a tiny recipe, by the stage's name."""
    from stage_work import tiny_work

    monkeypatch.setenv("SKYTRAIN_TRACKING", "off")
    return partial(tiny_work, tmp_path)


@pytest.fixture
def clean_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell without any variable or secret that a launch takes over."""
    from pipelines.store.secrets import SECRETS
    from pipelines.user.cloud.request import VARIABLES

    for name in (*VARIABLES, *SECRETS):
        monkeypatch.delenv(name, raising=False)
