"""The application of `skytrain serve`: OpenAI's completions for one model, and a page to type into.

It is made for a look at a run on one's own machine. It answers only requests that name it in their Host header, and
none that a foreign page sends: a page whose name resolves to 127.0.0.1 gets nothing. There is no CORS, and no account.
Everything is bounded: bytes, tokens, texts, waiting requests, and seconds.
"""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.sample import Fragment, TextModel
from pipelines.serve.requests import MAX_BYTES, CompletionRequest, Refused, parse
from pipelines.serve.turns import Turns
from trainer.errors import UserError

if TYPE_CHECKING:
    import tiktoken

    from trainer.sample import Sampling

T = TypeVar("T")
Say = Callable[[Any], Coroutine[Any, Any, None]]

BODY_SECONDS = 10.0  # for a request to arrive
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass
class Completion:
    """The answer to a request while it grows."""

    model: str
    asked: CompletionRequest
    ids: list[list[int]]  # of each text's prompt: n times the first prompt, then the second
    seeds: list[int]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(init=False)
    ends: list[Fragment | None] = field(init=False)
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)  # by text, if asked for

    def __post_init__(self) -> None:
        self.texts, self.ends = ["" for _ in self.ids], [None for _ in self.ids]

    @property
    def unseen(self) -> int:
        """The tokens in front of a prompt that its client did not send: a text begins its document."""
        return int(isinstance(self.asked.prompts[0], str))

    def prompt_text(self, number: int, encoding: "tiktoken.Encoding") -> str:
        prompt = self.asked.prompts[number // self.asked.n]
        return prompt if isinstance(prompt, str) else encoding.decode(prompt)

    def add(self, fragments: list[Fragment]) -> None:
        for one in fragments:
            self.texts[one.number] += one.text
            if one.finish:
                self.ends[one.number] = one

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, without the one that begins each document, and of the texts."""
        prompts = sum(len(ids) - self.unseen for ids in self.ids[:: self.asked.n])
        texts = sum(end.tokens for end in self.ends if end)
        return {"prompt_tokens": prompts, "completion_tokens": texts, "total_tokens": prompts + texts}

    def to_json(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}

    def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        choices = [
            choice(number, text, end.finish if end else None, self.logprobs.get(number))
            for number, (text, end) in enumerate(zip(self.texts, self.ends, strict=True))
        ]
        return self.to_json(choices, usage=self.usage)

    def events(self, fragments: list[Fragment]) -> Iterator[dict[str, Any]]:
        """What a stream says about these fragments."""
        more = {"usage": None} if self.with_usage else {}
        for one in fragments:
            yield self.to_json([choice(one.number, one.text, one.finish)], **more)

    @property
    def with_usage(self) -> bool:
        return bool(self.asked.stream_options and self.asked.stream_options.include_usage)


def choice(number: int, text: str, finish: str | None, logprobs: dict[str, list[Any]] | None = None) -> dict[str, Any]:
    return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": finish}


def logprobs_of(model: TextModel, completion: Completion, number: int) -> dict[str, list[Any]]:
    """The log probabilities of a text's tokens, with `echo` after those of its prompt, as OpenAI writes them."""
    asked, end = completion.asked, completion.ends[number]
    prompt = completion.ids[number]
    ids = [*prompt, *(end.ids if end else ())]
    scores = [(None, None), *model.decoder.score(ids, asked.logprobs or 0)]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    first = completion.unseen if asked.echo else len(prompt)
    for token, (logprob, top) in list(zip(ids, scores, strict=True))[first:]:
        text = model.token_text(token)
        likeliest: dict[str, float] = {}
        for other, value in top or ():
            likeliest.setdefault(model.token_text(other), value)
        found["tokens"].append(text)
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(None if top is None else likeliest)
        found["text_offset"].append(offset)
        offset += len(model.encoding.decode([token]))
    return found


def make_app(model: TextModel, hosts: set[str] | None, turns: Turns | None = None) -> ASGIApp:
    """The application for one model. `hosts`: the Host headers that it answers to; None: any."""
    made, line = int(time.time()), turns or Turns()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        line.close()

    # The pages of FastAPI's own documentation load scripts from elsewhere.
    app = FastAPI(title="skytrain", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    about = {"id": model.run, "object": "model", "created": made, "owned_by": "skytrain"}

    async def answer_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        headers = {"Retry-After": "5"} if error.status in (429, 503) else {}
        return JSONResponse(error.body, error.status, headers)

    async def answer_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refused = Refused(error.status_code, f"{error.detail}; see /v1/models, /v1/completions and /health")
        return JSONResponse(refused.body, error.status_code, error.headers)

    async def answer_fault(_: Request, error: Exception) -> Response:
        message = str(error) if isinstance(error, UserError) else "a fault of this server; its terminal shows more"
        return JSONResponse(Refused(500, message).body, 500)

    app.add_exception_handler(Exception, answer_fault)
    app.add_exception_handler(UserError, answer_fault)
    app.add_exception_handler(Refused, answer_refusal)
    app.add_exception_handler(HTTPException, answer_http_error)

    for path, (name, kind) in PAGE.items():
        app.add_api_route(path, page(name, kind), methods=["GET"], include_in_schema=False)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": model.run, "busy": line.busy, "waiting": line.waiting}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != model.run:
            raise Refused(404, f"no such model; this endpoint serves {model.run}", "model", "model_not_found")
        return about

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(await body_of(request), model.run)
        completion = begin(model, asked)
        line.check()
        if asked.stream:
            return Events(lambda send: stream(completion, send))
        found = await until_gone(request.receive, whole(completion))
        return JSONResponse(found) if found else Response(status_code=499)  # nobody reads it

    def steps(completion: Completion) -> AsyncIterator[list[Fragment]]:
        asked = completion.asked
        texts = model.continue_all(completion.ids, asked.max_tokens, completion.seeds, sampling_of(asked), asked.stops)
        return line.steps(texts)

    async def whole(completion: Completion) -> dict[str, Any]:
        async with line.turn():
            async with aclosing(steps(completion)) as found:  # type: ignore[type-var]
                async for fragments in found:
                    completion.add(fragments)
            if completion.asked.logprobs is not None:
                async with aclosing(line.steps(scores(completion))) as made:  # type: ignore[type-var]
                    async for number, logprobs in made:
                        completion.logprobs[number] = logprobs
        if completion.asked.echo:
            texts = enumerate(completion.texts)
            completion.texts = [completion.prompt_text(number, model.encoding) + text for number, text in texts]
        return completion.whole()

    def scores(completion: Completion) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        for number in range(len(completion.ids)):
            yield number, logprobs_of(model, completion, number)

    async def stream(completion: Completion, send: Say) -> None:
        try:
            async with line.turn(), aclosing(steps(completion)) as found:  # type: ignore[type-var]
                async for fragments in found:
                    completion.add(fragments)
                    for event in completion.events(fragments):
                        await send(event)
            if completion.with_usage:
                await send(completion.to_json([], usage=completion.usage))
        except Refused as error:
            await send(error.body)
        except UserError as error:
            await send(Refused(500, str(error)).body)

    return Guard(app, hosts)


def page(name: str, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """The route of a file of the page."""
    body = resources.files("pipelines.serve").joinpath("page", name).read_bytes()

    async def read() -> Response:
        return Response(body, media_type=f"{kind}; charset=utf-8")

    return read


def begin(model: TextModel, asked: CompletionRequest) -> Completion:
    """The completion of a request. Refused if a prompt and its text don't fit into the context."""
    ids = [model.ids_of(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    one = " (one begins the document)" if isinstance(asked.prompts[0], str) else ""
    for number, prompt in enumerate(ids):
        if max(prompt) >= model.encoding.n_vocab:
            raise Refused(400, f"prompt: {max(prompt)} is no token id; there are {model.encoding.n_vocab}", "prompt")
        if len(prompt) + asked.max_tokens > model.context:
            raise Refused(
                400,
                f"this model's maximum context length is {model.context} tokens; prompt {number} has "
                f"{len(prompt)}{one} and max_tokens is {asked.max_tokens}; shorten the prompt, or ask for less",
                "prompt",
                "context_length_exceeded",
            )
    seed = random.SystemRandom().randrange(1 << 62) if asked.seed is None else asked.seed
    rows = list(product(ids, range(asked.n)))
    return Completion(model.run, asked, [prompt for prompt, _ in rows], [seed + n for _, n in rows])


def sampling_of(asked: CompletionRequest) -> "Sampling":
    from trainer.sample import Sampling

    return Sampling(asked.temperature, asked.top_k, asked.top_p)


async def body_of(request: Request) -> bytes:
    """The JSON of a request. Refused if it is no JSON, too large, or does not arrive."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the Content-Type is application/json")  # a foreign page can't send that unasked
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise Refused(413, f"a request has at most {MAX_BYTES:,} bytes")
    except TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} s") from error
    return bytes(body)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, for a request that has arrived; None if its client has gone meanwhile. Then it is given
    up."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Events(Response):
    """Server-sent events, which `write` sends one by one, until their reader has gone."""

    def __init__(self, write: Callable[[Say], Coroutine[Any, Any, None]]) -> None:
        super().__init__(media_type="text/event-stream")
        self.write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def everything() -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self.write(lambda event: send_part(f"data: {json.dumps(event)}\n\n"))
            await send_part("data: [DONE]\n\n", more=False)

        await until_gone(receive, everything())


class Guard:
    """Answers requests to this server's own name, from its own page or from none, with headers that keep both apart."""

    def __init__(self, app: ASGIApp, hosts: set[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        if scope["type"] == "http" and (reason := self.refusal(dict(scope["headers"]))):
            await JSONResponse(Refused(403, reason).body, 403)(scope, receive, send_with_headers)
        elif scope["type"] != "websocket":  # there are none
            await self.app(scope, receive, send_with_headers)

    def refusal(self, headers: MutableMapping[bytes, bytes]) -> str | None:
        """Why a request is refused."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if self.hosts is not None and host not in self.hosts:
            return "this server answers on its own address only"
        if origin and origin != f"http://{host}":
            return "this server answers no page but its own"
        return None
