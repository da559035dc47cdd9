"""`skytrain image`: build, push and check the container image."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.verbs.options import WholeHelp, home, one_of
from trainer.errors import UserError

image_app = typer.Typer(
    name="image", cls=WholeHelp, help="The container image: build, push, check.", no_args_is_help=True
)

Target = Annotated[str, typer.Option("--target", help="runtime (GPUs), cpu, or skypilot.")]
BuildFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file for pip during the build, mounted as a secret: it enters no layer."),
]


@image_app.command()
def build(
    target: Target = "runtime",
    base_image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Another base image: Debian with Python 3.11, venv, pip and headers."),
    ] = None,
    pip_conf: BuildFile = None,
    ca_bundle: BuildFile = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="NETWORK", help="As for docker build: host, if the engine has no bridge."),
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Passed on to docker build; can be repeated."),
    ] = None,
) -> None:
    """Build the image from this clone, with its version and commit in labels."""
    from pipelines.cloud import image
    from pipelines.show.console import say

    one_of(target, image.TARGETS, "--target")
    root = Path(__file__).resolve().parents[2]
    built = image.build(root, home(), target, base_image, pip_conf, ca_bundle, network, tuple(build_arg or ()))
    say(f"{built.tag}  {built.id}" + ("  (with files that no commit holds)" if built.dirty else ""))


@image_app.command()
def push(
    name: Annotated[str, typer.Argument(metavar="REGISTRY/NAME", help="The destination; do docker login first.")],
    target: Target = "runtime",
) -> None:
    """Push the last build, and record its digest in SKYTRAIN_HOME/image.json."""
    from pipelines.cloud import image
    from pipelines.show.console import say

    one_of(target, image.TARGETS, "--target")
    say(image.push(home(), name, target).pushed or "")


@image_app.command()
def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="IMAGE", help="Any image; by default the last build of --target."),
    ] = None,
    target: Target = "runtime",
) -> None:
    """Inspect an image and run it with restricted rights; check its contents, its user and its labels."""
    from pipelines.cloud import image
    from pipelines.show.console import say
    from pipelines.show.findings import image_finding_text

    one_of(target, image.TARGETS, "--target")
    last = image.remembered(home()).get(target)
    if not (name or last):
        raise UserError(f"image check: no '{target}' was built here; build it first, or name an image")
    chosen = name or (last.id if last else "")
    violations = 0
    for finding in image.check(chosen):
        say(image_finding_text(finding))
        violations += finding.state == "broken"
    if violations:
        raise UserError(f"image check: {chosen}: {violations} of its promises are broken, see above")
