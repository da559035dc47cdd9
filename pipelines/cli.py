"""`skytrain`: the verbs. Heavy imports wait inside them, so that `--help` answers at once.

Exit codes: 0 done, 2 the user's mistake, 75 interrupted and resumable by the same command, 76 stopped because
somebody wanted the run to stop (so nothing may start it again by itself), 1 our fault.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from pipelines.bench.measure import bench
from pipelines.verbs.doctor import doctor
from pipelines.verbs.down import down
from pipelines.verbs.launch import launch
from pipelines.verbs.logs import logs
from pipelines.verbs.options import Changes, Json, RecipeName, StoreUri, default_tracking_uri, home, one_of, store_uri
from pipelines.verbs.orphans import orphans
from pipelines.verbs.resume import resume
from pipelines.verbs.status import status
from pipelines.verbs.stop import stop
from trainer.errors import EXIT_FAILED, EXIT_MISTAKE, Ending

if TYPE_CHECKING:
    from pipelines.stage import Pipeline
    from pipelines.tracking.runs import Run
    from trainer.store import Store

TRACKING_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
PROGRAM = "skytrain"


# click's, or that of typer's own copy of click.
UsageError: Any = typer.BadParameter.__base__


class Verbs(TyperGroup):
    """Exceptions that typer would take for its own: Ctrl-C has an exit code here, a fault its traceback, and a wrong
    option one line, as any other mistake."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with usage_in_a_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with usage_in_a_line():
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            ending = ending_of(error)
            assert ending
            print(ending.message, file=sys.stderr)
            sys.exit(ending.exit_code)
        except EOFError as error:
            raise RuntimeError("a file ended too early") from error


@contextmanager
def usage_in_a_line() -> Iterator[None]:
    """End with 2 and a line about an option or argument that can't be meant."""
    try:
        yield
    except UsageError as error:
        said = error.format_message()
        if "\n" in said or error.ctx is None:
            raise  # a verb of several, without one: its help
        command = error.ctx.command_path
        said = said[0].lower() + said[1:].removesuffix(".") + ("" if said.endswith("?") else ";")
        verb = command.removeprefix(PROGRAM).lstrip()
        print(f"error: {f'{verb}: ' if verb else ''}{said} {command} --help tells what it takes", file=sys.stderr)
        sys.exit(EXIT_MISTAKE)


app = typer.Typer(
    cls=Verbs,
    help="Train GPT-2 from one recipe: tokenize, train, evaluate, export. Interrupt it anywhere; "
    "the same command goes on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

image_app = typer.Typer(help="The container image: build, push, check.", no_args_is_help=True)
app.add_typer(image_app, name="image")
cloud_app = typer.Typer()
for verb in (launch, doctor, status, logs, stop, resume, down, orphans):
    cloud_app.command()(verb)
app.add_typer(cloud_app)
app.command()(bench)


@app.command()
def run(
    recipe: RecipeName,
    stage: Annotated[str, typer.Option(help="The last stage to run: tokenize, train, evaluate or export.")] = "export",
    store: StoreUri = None,
    set_: Changes = None,
    price_per_hour: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.0, metavar="USD", help="What one node of this machine costs an hour."),
    ] = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.001, metavar="USD", help="Stop on a commit before all of the run has cost more; exit code 76."
        ),
    ] = None,
    unless_stopped: Annotated[
        bool,
        typer.Option("--unless-stopped", help="End with 76 if `skytrain stop` was given; else that is forgotten."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run what is missing of a recipe; skip what exists; go on with what was interrupted."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud.budget import Budget
    from pipelines.cloud.deadline import before_ranks, deadline_watch, is_standby
    from pipelines.cloud.notice import watching
    from pipelines.cloud.prices import billing_here
    from pipelines.nodes.address import this_node
    from pipelines.nodes.head import Head
    from pipelines.show.console import TerminalScreen
    from pipelines.stage import STAGES, Pipeline, missing, planned, run_name
    from pipelines.tracking.mlflow.tracker import Tracker
    from pipelines.tracking.stop_request import clear_stop_request, read_stop_request, watch_stop_request
    from trainer.errors import Stopped, StoreUnavailable, UserError
    from trainer.process import StopSignal

    one_of(stage, STAGES, "--stage")
    place = this_node()
    stop = StopSignal()
    opened = open_store(store_uri(store))  # its mistakes show before gigabytes of text are hashed
    try:
        loaded, plans = planned(recipe, set_ or [], opened)
    except StoreUnavailable as error:
        if unless_stopped:  # a machine that can't reach the store at all would be rented again and again
            raise UserError(f"{error}; this machine has never reached it") from error
        raise
    name = run_name(plans)
    folder = home()
    if not unless_stopped:
        clear_stop_request(opened, name)
    elif wish := read_stop_request(opened, name):
        raise Stopped(str(wish))
    if place.rank:
        from pipelines.nodes.worker import run_worker

        screen = TerminalScreen(quiet=as_json)
        with watching(stop, screen):
            sys.exit(run_worker(place, name, stage, loaded, plans, opened, folder, stop, screen, is_standby()))
    tracker = Tracker(folder / "tracking" / name, name, default_uri=default_tracking_uri())
    pipeline = Pipeline(
        loaded,
        opened,
        folder,
        billing_here(price_per_hour),
        tracker,
        TerminalScreen(quiet=as_json),
        stop,
        plans,
        watches=[watch_stop_request(opened, name)],
        head=Head(place, name, stop, exit_code) if place.count > 1 else None,
        before_ranks=before_ranks,
    )
    if watch := deadline_watch(pipeline.billing, loaded, stop):
        pipeline.watches.append(watch.watch)
    limit = Budget(budget, pipeline.billing, opened, name, loaded.train.batch_tokens, stop) if budget else None
    try:
        with watching(stop, pipeline.screen), pipeline.head or nullcontext():
            if limit and missing(opened, plans, until=stage):
                limit.begin()
                pipeline.watches.append(limit.watch)
            pipeline.execute(until=stage)
    finally:
        # A store that is away has nothing to tell, and asking it would only wait as long again.
        if as_json and not isinstance(sys.exception(), UserError | StoreUnavailable):
            print(json.dumps(result(pipeline)))
    if not as_json:
        from pipelines.show.tables import print_card

        print_card(pipeline)


@app.command()
def plan(
    recipe: RecipeName,
    store: StoreUri = None,
    set_: Changes = None,
    cloud: Annotated[
        bool, typer.Option("--cloud", help="Compare rented machines: hours and dollars of what is left to do.")
    ] = False,
    deadline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="With --cloud: to be done in 36h, 2d or 90m."),
    ] = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.01, metavar="USD", help="With --cloud: to be done for so much."),
    ] = None,
    gpus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="GPU:N,…", help="With --cloud: nodes to train on [H100:8,H200:8,A100-80GB:8]."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --cloud: how many nodes train.")] = 1,
    infra: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="CLOUD,…", help="With --cloud: whose price lists to read [aws,gcp,lambda]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what `run` would make, what is there already, and why the rest is not; --cloud: what it would cost where."""
    from pipelines.artifacts.store import open_store
    from pipelines.show.tables import plan_of, print_plan
    from pipelines.stage import planned
    from trainer.errors import UserError

    opened = open_store(store_uri(store))
    loaded, plans = planned(recipe, set_ or [], opened)
    shown = plan_of(loaded, opened, plans)
    if not cloud:
        if deadline or budget or gpus or infra or nodes > 1:
            raise UserError("plan: --deadline, --budget, --gpus, --nodes and --infra belong to --cloud; add it")
        print(json.dumps(shown)) if as_json else print_plan(shown)
        return
    from pipelines.cloud import plan as cloud_plans
    from pipelines.show.cloud_plan import print_cloud_plan

    limits = cloud_plans.Limits(cloud_plans.parse_hours(deadline) if deadline else None, budget)
    train_nodes = gpus.split(",") if gpus else cloud_plans.TRAIN_NODES
    clouds = infra.split(",") if infra else cloud_plans.CLOUDS
    found = cloud_plans.cloud_plan(loaded, opened, limits, train_nodes, nodes, clouds, plans)
    if as_json:
        print(json.dumps(shown | {"cloud": found.to_json()}))
    else:
        print_plan(shown)
        print_cloud_plan(found)


@app.command()
def report(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[RUN]...", help="Runs, or the beginnings of their names; all by default."),
    ] = None,
    store: StoreUri = None,
    as_json: Json = False,
    series: Annotated[bool, typer.Option("--series", help="Print the run's series as CSV, a row a step.")] = False,
    audit_: Annotated[
        bool, typer.Option("--audit", help="Recompute which text every step read; exit code 1 if it read another.")
    ] = False,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--html", metavar="FILE", help="Write one page with curves, attempts, the bill, lineage, receipt."
        ),
    ] = None,
    overlay: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="LOG[@TOKENS]",
            help="With --html: a main.log of llm.c beside the curves; @ says how many tokens a step has (524288).",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="What differs between two runs, and what came of it at equal cost.")
    ] = False,
    rebuild_mlflow: Annotated[
        bool, typer.Option("--rebuild-mlflow", help="Tell an MLflow server again all that the runs ever told one.")
    ] = False,
    to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--to", metavar="URI", help="The MLflow to rebuild [MLFLOW_TRACKING_URI; .skytrain/mlflow.db]"),
    ] = None,
) -> None:
    """What runs did and cost: state, attempts, tokens, val loss, hours, dollars."""
    from pipelines.artifacts.store import open_store
    from pipelines.show.tables import print_audit, print_bill, print_runs, print_series, sky_differences
    from pipelines.tracking.audit import audit
    from pipelines.tracking.runs import read_runs
    from trainer.errors import UserError

    if overlay and not html:
        raise UserError("--overlay: it is laid over the curves of a page; add --html FILE")
    opened = open_store(store_uri(store))
    found = read_runs(opened, runs or [])
    if compare:
        return compare_runs(opened, runs or [], as_json)
    if rebuild_mlflow:
        return rebuild_tracking(opened, found, to)
    if series:
        for run in found:
            print_series(run.name, run.series, as_json, alone=len(found) == 1)
        return
    if audit_:
        audits = [audit(run) for run in found]
        print(json.dumps([asdict(a) for a in audits])) if as_json else print_audit(audits)
        sys.exit(any(a.wrong_steps or a.missing_steps for a in audits))
    if html:
        from pipelines.show.page import write_page

        return write_page(html, opened, found, overlay or [])
    if not as_json:
        summaries = [run.summary for run in found]
        print_runs(summaries, opened.uri, [line for run in found for line in sky_differences(opened, run.account)])
        if runs and len(found) == 1:
            print()
            print_bill(found[0].account)
        return
    print(json.dumps([asdict(run.summary) | {"account": asdict(run.account)} for run in found]))


@app.command()
def sample(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or the beginning of its name.")],
    prompt: Annotated[str, typer.Option(help="The text to continue; empty for a new document.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal text.")] = 0,
    store: StoreUri = None,
) -> None:
    """Generate text with a trained run."""
    from pipelines.artifacts.store import open_store
    from pipelines.sample import sample_run

    print(sample_run(open_store(store_uri(store)), home() / "cache", run, prompt, tokens, seed))


@app.command()
def recipes(as_json: Json = False) -> None:
    """The recipes that come with skytrain: size, tokens, FLOPs, and what they cost to train."""
    from pipelines.show.tables import print_recipes, shipped_rows

    print(json.dumps(shipped_rows())) if as_json else print_recipes()


@app.command()
def gc(
    store: StoreUri = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    older_than_days: Annotated[
        float, typer.Option(min=0.0, help="Unfinished artifacts go once nobody has touched them for so long.")
    ] = 7.0,
) -> None:
    """Remove what no manifest and no living or resumable attempt refers to."""
    from pipelines.artifacts.store import open_store
    from pipelines.gc import leftovers, remove

    opened = open_store(store_uri(store))
    count = size = 0
    faults: list[str] = []
    # Looked at one artifact at a time, just before it goes.
    for leftover in leftovers(opened, home(), older_than_days, faults.append):
        print(f"{leftover.size:>15,}  {leftover.path or leftover.key}  ({leftover.why})")
        if not dry_run:
            remove(opened, leftover)
        count, size = count + 1, size + leftover.size
    verb = "would be removed" if dry_run else "removed"
    print(f"{count} objects, {size:,} bytes {verb} in {opened.uri}")
    for fault in faults:
        print(f"left alone: {fault}", file=sys.stderr)


@app.command()
def drill(
    recipe: RecipeName = "smoke",
    kills: Annotated[int, typer.Option(min=0, help="How many blows.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal blows.")] = 0,
    kinds: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="KIND,…", help="kill, term, corrupt, rival, world, cut, mlflow; by default all."),
    ] = None,
    store: StoreUri = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", metavar="FILE", help="Write all of it as JSON."),
    ] = None,
    set_: Changes = None,
) -> None:
    """Kill a run again and again in every phase, and prove that nothing came of it: exit 0 only if so."""
    from pipelines.drill.drill import drill
    from pipelines.show.console import TerminalScreen
    from pipelines.show.drill import print_report

    done = drill(
        recipe, set_ or [], store_uri(store), kills, seed, kinds.split(",") if kinds else None, TerminalScreen().note
    )
    if report:
        report.write_text(done.json())
    print_report(done)
    if not done.passed:
        sys.exit(1)


ImageTarget = Annotated[str, typer.Option("--target", help="runtime (GPUs), cpu, or skypilot.")]
BuildFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", help="Given to pip during the build as a secret; it enters no layer."),
]


@image_app.command("build")
def image_build(
    target: ImageTarget = "runtime",
    base_image: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="IMAGE", help="Another base: Debian with Python 3.11, venv, pip and headers."),
    ] = None,
    pip_conf: BuildFile = None,
    ca_bundle: BuildFile = None,
    network: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NETWORK", help="As docker's own: host, where the engine has no bridge."),
    ] = None,
    build_arg: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME=VALUE", help="Passed on to docker build; can be repeated."),
    ] = None,
) -> None:
    """Build the image from this clone, with its version and commit in labels."""
    from pipelines.cloud import image

    one_of(target, image.TARGETS, "--target")
    root = Path(__file__).resolve().parents[1]
    built = image.build(root, home(), target, base_image, pip_conf, ca_bundle, network, tuple(build_arg or ()))
    print(f"{built.tag}  {built.id}" + ("  (from files that no commit holds)" if built.dirty else ""))


@image_app.command("push")
def image_push(
    name: Annotated[str, typer.Argument(metavar="REGISTRY/NAME", help="Where to; docker login is yours to do.")],
    target: ImageTarget = "runtime",
) -> None:
    """Push what was last built, and write down its digest in SKYTRAIN_HOME/image.json."""
    from pipelines.cloud import image

    one_of(target, image.TARGETS, "--target")
    print(image.push(home(), name, target).pushed)


@image_app.command("check")
def image_check(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[IMAGE]", help="Any image; by default what was last built of --target."),
    ] = None,
    target: ImageTarget = "runtime",
) -> None:
    """Look into an image and run it locked down: does it hold what it promises, and nothing it must not?"""
    from pipelines.cloud import image
    from pipelines.show.findings import image_finding_text
    from trainer.errors import UserError

    one_of(target, image.TARGETS, "--target")
    last = image.remembered(home()).get(target)
    if not (name or last):
        raise UserError(f"image check: no '{target}' was built here; build it first, or name an image")
    chosen = name or (last.id if last else "")
    faults = 0
    for finding in image.check(chosen):
        print(image_finding_text(finding))
        faults += finding.state == "broken"
    if faults:
        raise UserError(f"image check: {chosen}: {faults} of its promises are broken, see above")


def compare_runs(store: "Store", names: list[str], as_json: bool) -> None:
    from pipelines.show.tables import print_comparison
    from pipelines.tracking.compare import compare
    from pipelines.tracking.runs import read_run
    from trainer.errors import UserError

    if len(names) != 2:
        raise UserError(f"report --compare: takes two runs, got {len(names)}; name them: report --compare A B")
    one, other = (read_run(store, name) for name in names)
    compared = compare(one, other)
    print(json.dumps(asdict(compared))) if as_json else print_comparison(compared)


def rebuild_tracking(store: "Store", runs: "list[Run]", to: str | None) -> None:
    from pipelines.tracking.mlflow.settings import tracking_uri
    from pipelines.tracking.mlflow.shipper import rebuild
    from trainer.errors import UserError

    if not find_spec("mlflow"):
        raise UserError("report --rebuild-mlflow: needs mlflow; pip install mlflow")
    uri = tracking_uri(to, default_tracking_uri())
    if uri.partition(":")[0].partition("+")[0] not in TRACKING_SCHEMES:
        raise UserError(f"--to {uri}: no MLflow; give http(s)://server, or a database such as sqlite:///mlflow.db")
    for run in runs:
        sessions = rebuild(store, run.name, uri)
        print(f"{run.name}: {sessions} session(s) told again" if sessions else f"{run.name}: told MLflow nothing")


def result(pipeline: "Pipeline") -> dict[str, Any]:
    """What `run --json` prints, finished or interrupted."""
    summary = pipeline.snapshot().summary
    return {
        "run": pipeline.run,
        "state": summary.state,
        "attempts": summary.attempts,
        "usd": summary.usd,
        "billed_hours": summary.billed_hours,
        "unpriced_hours": summary.unpriced_hours,
        "val_loss": summary.val_loss,
        "artifacts": {
            stage: {
                "uri": f"{pipeline.store.uri}/{manifest.prefix}",
                "fingerprint": manifest.fingerprint,
                "skipped": pipeline.skipped[stage],
            }
            for stage, manifest in pipeline.made.items()
        },
    }


def main() -> None:
    try:
        app(prog_name=PROGRAM)
    except (Exception, KeyboardInterrupt) as error:
        ending = ending_of(error)
        if ending is None:
            raise
        print(ending.message, file=sys.stderr)
        sys.exit(ending.exit_code)


def ending_of(error: BaseException) -> Ending | None:
    """How `error` ends the command; None for a fault of ours."""
    from trainer.errors import ending_of as known_ending_of
    from trainer.errors import is_full

    # Looked up in sys.modules: importing SkyPilot takes seconds, and without it there is no such error.
    sky = sys.modules.get("sky.exceptions")
    if sky is not None and isinstance(error, sky.ApiServerConnectionError):
        message = "error: SkyPilot's API server does not answer; start it with `sky api start`, or see `sky api info`"
        return Ending(EXIT_MISTAKE, message)
    if isinstance(error, OSError) and is_full(error) and not error.filename:
        error.filename = str(home())
    return known_ending_of(error)


def exit_code(error: BaseException) -> int:
    ending = ending_of(error)
    return ending.exit_code if ending else EXIT_FAILED


if __name__ == "__main__":
    main()
