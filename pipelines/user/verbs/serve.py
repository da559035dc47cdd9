"""`skytrain serve`: a completions endpoint for a look at a run, on this machine."""

import re
import socket
from typing import Annotated

import typer

from pipelines.user.verbs.options import Precision, RunName, Step, StoreUri, home, open_text_model, store_uri
from trainer.config.errors import UserError

LOOPBACK = "127.0.0.1"
CONNECTIONS = 128  # all of them; of these, idle ones make room
GRACE_SECONDS = 3  # for answers that are being written at Ctrl-C


def serve(
    run: RunName,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0: any free one.")] = 8000,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen on this address; anybody who reaches it can use the model.")
    ] = LOOPBACK,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Answer requests to this name of the machine, too; repeatable."),
    ] = None,
    at: Step = None,
    precision: Precision = None,
    store: StoreUri = None,
) -> None:
    """Serve OpenAI's completions API from a run's weights, and chat from a tuned model, with a page to type into.

    For real load, sky/serve.yaml serves the export with vLLM.
    """
    import uvicorn

    from pipelines.extras.serve.app import make_app
    from pipelines.extras.serve.limits import ImpatientProtocol
    from pipelines.user.show.console import say

    for name in allow_host or []:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UserError(
                f"--allow-host {name}: must be a name such as gpu-box.example.org, without http:// and port"
            )
    listening = listen(host, port)
    with listening:
        model = open_text_model(store_uri(store), home() / "cache", run, at, precision, tuned=at is None)
        bound = listening.getsockname()[1]
        if host not in (LOOPBACK, "localhost", "::1"):
            say(
                f"warning: --host {host}: anybody who reaches this address can use the model; it has no accounts",
                True,
            )
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{bound}/  ({model.run}, {model.decoder.precision}; Ctrl-C ends it)")
        say(f"OpenAI's clients: base_url http://{shown}:{bound}/v1, any api_key, model {model.run}")
        config = uvicorn.Config(
            make_app(model, ["localhost", host, *(allow_host or [])]),
            http=ImpatientProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=GRACE_SECONDS,
            lifespan="on",
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            say("")


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address. UserError if it is taken, or none of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        option = f"--port {port}" if host == LOOPBACK else f"--host {host} --port {port}"
        raise UserError(f"{option}: {error.strerror}; choose another one, or --port 0 for any free one") from error
    return listening
