"""The application of `skytrain serve`: OpenAI's completions for one model, and a page to type into.

It is made for a look at a run on one's own machine: one generation at a time. It answers only requests that name it in
their Host header, and none that a foreign page sends: a page whose name resolves to this machine gets nothing. There is
no CORS, and no account. Bytes, tokens, texts, seconds and idle connections are bounded; uvicorn bounds all connections.

Source of the shapes: OpenAI's API reference, "Completions" (legacy) and "Chat". Arguments that this endpoint does not
have are refused by name, never silently ignored; a value that changes nothing is accepted.
"""

import asyncio
import json
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipelines.run.sample import Fragment, TextModel
from trainer.config.errors import UserError, cut

MAX_BYTES = 1 << 20  # of a request
MAX_TEXTS = 16  # prompts times n
WAIT_SECONDS = 120.0  # then a waiting request is refused
GENERATION_SECONDS = 600.0  # of one request, with the time that its client takes to read
ARRIVAL_SECONDS = 10.0  # of a request
MAX_IDLE = 64  # connections without a whole request, of up to MAX_BYTES each; the oldest makes room for a new one
MAX_STOPS = 4
MAX_MESSAGES = 1000
ADDRESS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+\]"
PAGE = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Many = Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)

# Values that change nothing, of arguments that requests and messages here do not have. Clients send them as defaults.
NEUTRAL: dict[str, list[Any]] = {
    name: values
    for names, *values in (
        ("annotations functions tools tool_calls", []),
        ("logit_bias metadata", {}),
        ("frequency_penalty presence_penalty top_logprobs", 0),
        ("logprobs store", False),
        ("function_call tool_choice", "auto", "none"),
        ("service_tier", "auto", "default"),
        ("parallel_tool_calls", True, False),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("best_of", 1),
        ("suffix", ""),
    )
    for name in names.split()
}
KINDS = {
    "prompt": f"should be a valid string, a list of token ids, or a list of 1 to {MAX_TEXTS} of one kind",
    "content": "should be a valid string, or a list of text parts",
}


class Refused(Exception):
    """A request that is not served, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Given(BaseModel):
    """A part of a request. Unknown fields are errors, unless their value changes nothing: null, or one of NEUTRAL."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        return {k: v for k, v in values.items() if v is not None and (k in known or v not in NEUTRAL.get(k, ()))}


class StreamOptions(Given):
    """What a stream has besides text."""

    include_usage: bool = False


class TextRequest(Given):
    """The arguments that both kinds of requests have. `top_k` is our addition."""

    model: str | None = None
    max_tokens: int = Field(default=16, ge=1, le=1 << 20)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_TEXTS)
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted and not used

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class CompletionRequest(TextRequest):
    """A request to continue one or several prompts, which are texts, or token ids that are taken as they are."""

    prompt: str | Annotated[list[str], Many] | Ids | Annotated[list[Ids], Many] = ""
    max_tokens: int = Field(default=16, ge=0, le=1 << 20)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)  # OpenAI's limit

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Given):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Given):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(min_length=1)]

    @field_validator("content", mode="before")
    @classmethod
    def _one_part(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @property
    def plain(self) -> dict[str, str]:
        """The message for the chat template, with its parts joined as vLLM joins them."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class ChatRequest(TextRequest):
    """A request to answer a conversation. `max_tokens` is by default what the context leaves."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 20)


class Answer(JSONResponse):
    """JSON in ASCII, which holds what UTF-8 cannot: half of a surrogate pair in what a message quotes."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


@asynccontextmanager
async def turn(lock: asyncio.Lock, wait_seconds: float) -> AsyncIterator[None]:
    """Wait for the turn of a request, and have it: one generation at a time. Refused after a long wait."""
    try:
        async with asyncio.timeout(wait_seconds):
            await lock.acquire()
    except TimeoutError as error:
        message = f"not served within {wait_seconds:g} s, because other requests take long; try again later"
        raise Refused(503, message, code="queue_timeout") from error
    try:
        yield
    finally:
        lock.release()


def make_app(
    model: TextModel,
    hosts: Iterable[str],
    wait_seconds: float = WAIT_SECONDS,
    seconds: float = GENERATION_SECONDS,
) -> ASGIApp:
    """The application for one model. `hosts`: the names that it answers to, see `Guard`."""
    # The pages of FastAPI's own documentation load scripts from elsewhere.
    app = FastAPI(title="skytrain", docs_url=None, redoc_url=None, openapi_url=None)
    writer = Writer(model, wait_seconds, seconds)
    about = {"id": model.run, "object": "model", "created": int(time.time()), "owned_by": "skytrain"}
    about |= {"chat": model.chat is not None, "context": model.context}  # for the page

    for kind in (Exception, UserError, Refused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, refusal)
    for path, name in PAGE.items():
        app.add_route(path, partial(page, name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": model.run, "busy": writer.lock.locked()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != model.run:
            raise Refused(404, f"no such model; this endpoint serves {model.run}", "model", "model_not_found")
        return about

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        if model.chat is None:
            raise Refused(404, "chat is not served: a base model continues text; use /v1/completions")
        prompt = model.chat.prompt([message.plain for message in asked.messages])
        given = asked.max_completion_tokens or ("max_tokens" in asked.model_fields_set and asked.max_tokens)
        room = asked.model_copy(update={"max_tokens": given or max(1, model.context - len(prompt))})
        return await writer.answer(room, checked_prompts(model, room, [prompt], "messages"), request)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        if not asked.max_tokens and not asked.echo:
            raise Refused(400, "max_tokens: should be greater than or equal to 1 without echo", "max_tokens")
        if asked.stream and (asked.echo or asked.logprobs is not None):
            raise Refused(400, "stream: not with echo or logprobs; leave it out", "stream")
        ids = [model.ids_of(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        prompts = checked_prompts(model, asked, ids, "prompt")
        return await writer.answer(asked, prompts, request)

    return Guard(app, hosts)


async def refusal(_: Request, error: Exception) -> Response:
    """The answer to a request that ended with an error."""
    if isinstance(error, RequestValidationError):
        error = refused(error)
    elif isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{error.detail}; see /v1/models, /v1/completions and /health")
    elif not isinstance(error, Refused):
        message = str(error) if isinstance(error, UserError) else "an internal error; the server's terminal has it"
        error = Refused(500, message)
    return Answer(error.body, error.status)


class Writer:
    """Writes the texts of requests, one request at a time."""

    def __init__(self, model: TextModel, wait_seconds: float, seconds: float) -> None:
        """`wait_seconds` bounds the wait of a request, `seconds` its generation."""
        self.model, self.wait_seconds, self.seconds = model, wait_seconds, seconds
        self.lock = asyncio.Lock()

    async def answer(self, asked: TextRequest, prompts: list[list[int]], request: Request) -> Response:
        """The texts, or a stream of them."""
        name, kind = ("chatcmpl", "chat.completion") if isinstance(asked, ChatRequest) else ("cmpl", "text_completion")
        base = {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        base["model"] = self.model.run
        if asked.stream:
            stream = self.events(asked, prompts, base)
            return StreamingResponse(stream, media_type="text/event-stream")
        own = asked if isinstance(asked, CompletionRequest) else CompletionRequest()
        given = [self.model.text_of(prompt[unseen(asked) :])[0] if own.echo else "" for prompt in prompts]
        texts, ends = [text for text in given for _ in range(asked.n)], [Fragment(0, "")] * len(given) * asked.n
        scores: dict[int, Any] = {}
        async for one in self.fragments(asked, prompts):
            n = one.number
            texts[n] += one.text
            ends[n] = one
            if one.finish and own.logprobs is not None:  # still in the turn of the request
                scores[n] = await run_in_threadpool(self.logprobs, own, prompts[n // asked.n], texts[n], one)
            if await request.is_disconnected():
                return Response(status_code=499)
        choices = [choice(asked, n, texts[n], end.finish, logprobs=scores.get(n)) for n, end in enumerate(ends)]
        usage = usage_of(asked, prompts, [end.tokens for end in ends])
        return Answer(base | {"choices": choices, "usage": usage})

    async def fragments(self, asked: TextRequest, prompts: list[list[int]]) -> AsyncIterator[Fragment]:
        """Wait for the turn, and generate: n texts for each prompt, one prompt after the other, in a thread."""
        from trainer.models.decoder import Sampling

        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
        seed = random.SystemRandom().randrange(1 << 62) if asked.seed is None else asked.seed
        seeds = [seed + n for n in range(asked.n)]
        async with turn(self.lock, self.wait_seconds):
            late = time.monotonic() + self.seconds
            for first, prompt in enumerate(prompts):
                steps = self.model.continue_prompt(prompt, asked.max_tokens, seeds, sampling, asked.stop)
                async for step in iterate_in_threadpool(steps):
                    if time.monotonic() > late:
                        raise Refused(503, f"the generation took more than {self.seconds:g} s", code="timeout")
                    for one in step:
                        yield replace(one, number=first * asked.n + one.number)

    def logprobs(self, asked: CompletionRequest, prompt: list[int], text: str, end: Fragment) -> dict[str, list[Any]]:
        """The log probabilities of a text's tokens, in one pass; with `echo` after its prompt's, whose first has none.
        Tokens that a stop string cut off are left out; an end-of-text token is the last."""
        model, first = self.model, unseen(asked) if asked.echo else len(prompt)
        given, offsets = model.text_of(prompt[first:])
        made = [len(given) + offset for offset in model.text_of(end.ids)[1]]
        offsets += [offset for n, offset in enumerate(made) if offset < len(text) or n >= end.tokens]
        ids = [*prompt, *end.ids][: first + len(offsets)]
        scores = [None, *model.decoder.score(ids, asked.logprobs or 0)]
        if first < len(prompt):
            scores[first] = None
        return {
            "tokens": [model.name_of(token) for token in ids[first:]],
            "token_logprobs": [score and score[token] for token, score in zip(ids, scores, strict=True)][first:],
            "top_logprobs": [score and {model.name_of(i): p for i, p in score.items()} for score in scores[first:]],
            "text_offset": offsets,
        }

    async def events(self, asked: TextRequest, prompts: list[list[int]], base: dict[str, Any]) -> AsyncIterator[str]:
        """Server-sent events, to the last one, "[DONE]"."""
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        base |= {"usage": None} if usage else {}
        base["object"] += ".chunk" if isinstance(asked, ChatRequest) else ""
        tokens: dict[int, int] = {}  # of each text that has begun
        try:
            async for one in self.fragments(asked, prompts):
                first = one.number not in tokens
                tokens[one.number] = one.tokens
                yield event(base | {"choices": [choice(asked, one.number, one.text, one.finish, first)]})
            if usage:
                yield event(base | {"choices": [], "usage": usage_of(asked, prompts, tokens.values())})
        except (Refused, UserError) as error:
            yield event((error if isinstance(error, Refused) else Refused(500, str(error))).body)
        yield "data: [DONE]\n\n"


def choice(
    asked: TextRequest, number: int, text: str, finish: str | None, first: bool = True, logprobs: Any = None
) -> dict[str, Any]:
    """A text of an answer, or a part of one in a stream, of which the `first` names the role: clients join them."""
    said: dict[str, Any] = {"text": text}
    if isinstance(asked, ChatRequest):
        role = {"role": "assistant"} if first else {}
        said = {"delta" if asked.stream else "message": {**role, "content": text}}
    return said | {"index": number, "logprobs": logprobs, "finish_reason": finish}


def event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


def unseen(asked: TextRequest) -> int:
    """The tokens before a prompt that its client did not send: one begins the document of a text."""
    return 0 if isinstance(asked, CompletionRequest) and isinstance(asked.prompts[0], list) else 1


def usage_of(asked: TextRequest, prompts: Sequence[list[int]], texts: Collection[int]) -> dict[str, int]:
    """Tokens of the prompts, without the one that begins each document, and of the texts."""
    given, made = sum(len(prompt) - unseen(asked) for prompt in prompts), sum(texts)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def checked_prompts(model: TextModel, asked: TextRequest, prompts: list[list[int]], param: str) -> list[list[int]]:
    """The token ids of the prompts. Refused if the request is for another model or too large."""
    if asked.model not in (None, model.run):
        message = f"the model '{cut(asked.model)}' does not exist; this endpoint serves {model.run}"
        raise Refused(404, message, "model", "model_not_found")
    if len(prompts) * asked.n > MAX_TEXTS:
        raise Refused(400, f"n: {len(prompts)} prompts x {asked.n} are more than {MAX_TEXTS} texts", "n")
    vocabulary = (model.chat or model.encoding).n_vocab
    if wrong := [token for prompt in prompts for token in prompt if not 0 <= token < vocabulary]:
        raise Refused(400, cut(f"{param}: {wrong[0]} is not a token id, 0 to {vocabulary - 1}"), param)
    longest, begins = max(map(len, prompts)), " (one begins the document)" * unseen(asked)
    if longest + asked.max_tokens > model.context:
        message = (
            f"this model's maximum context length is {model.context} tokens; a prompt has {longest}{begins} and "
            f"max_tokens is {asked.max_tokens}; shorten the prompt, or ask for less"
        )
        raise Refused(400, message, param, "context_length_exceeded")
    return prompts


def refused(error: RequestValidationError) -> Refused:
    """The first problem of a request."""
    problem = error.errors()[0]
    if problem["type"] == "json_invalid" or len(problem["loc"]) < 2:
        return Refused(400, "the body must be a JSON object, with the Content-Type application/json")
    top, *inner = problem["loc"][1:]
    inner = [] if top == "prompt" else inner  # which kind of a prompt it might be
    field = cut(str(top) + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in inner))
    name = str([top, *inner][-1])
    if problem["type"] == "extra_forbidden":
        known = NEUTRAL.get(name)
        hint = f"; leave it out, or give {' or '.join(map(json.dumps, known))}" if known else ""
        return Refused(400, f"unrecognized request argument: {field}{hint}", field)
    return Refused(400, cut(f"{field}: {KINDS.get(name, problem['msg'])}"), field)


async def page(name: str, _: Request) -> Response:
    """A file of the page."""
    return FileResponse(Path(__file__).with_name("page") / name)


class Guard:
    """Answers short requests to this server, from its own page or from none, with headers that keep both apart.

    A Host header names an address, or one of `hosts`, with any port. Only by a name of its own can a foreign page lead
    a browser here as if to itself (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        known = "|".join([ADDRESS, *map(re.escape, hosts)])
        self.app, self.host = app, re.compile(f"({known})(:[0-9]+)?", re.IGNORECASE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        if scope["type"] == "http" and (refusal := self.refusal(scope)):
            await Answer(refusal.body, refusal.status)(scope, receive, send_with_headers)
        elif scope["type"] != "websocket":  # there are none
            await self.app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> Refused | None:
        """Why a request is refused."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if not self.host.fullmatch(host):
            return Refused(403, "this server answers on its own address only, or to a name given by --allow-host")
        if origin and origin != f"http://{host}":
            return Refused(403, "this server answers no page but its own")
        if b"transfer-encoding" in headers or int(headers.get(b"content-length", "0")) > MAX_BYTES:
            return Refused(413, f"a request has a Content-Length of at most {MAX_BYTES:,} bytes")
        if scope["method"] == "POST" and headers.get(b"content-type", "").partition(";")[0] != "application/json":
            return Refused(415, "the Content-Type is application/json")  # a foreign page can't send that unasked
        return None


class ImpatientProtocol(H11Protocol):
    """Closes a connection on which no whole request has arrived for ARRIVAL_SECONDS, for which uvicorn waits for ever,
    or that is the oldest of more than MAX_IDLE such ones, or on which more than MAX_BYTES arrive during an answer. So
    silent connections lock nobody out.

    h11 reads a request once the one before is answered. httptools reads it at once: if its client leaves then, uvicorn
    goes on with the answer to the first one.
    """

    limit: asyncio.TimerHandle | None = None  # while it is idle
    ahead = 0  # bytes of later requests that arrived during an answer, which h11 holds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.ahead = self.ahead + len(data) if self._answers else 0
        if self.ahead > MAX_BYTES:
            self.transport.close()
        self._limit_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_arrival()

    @property
    def _answers(self) -> bool:
        return bool(self.cycle) and not self.cycle.more_body and not self.cycle.response_complete

    def _limit_arrival(self) -> None:
        if self._answers:
            self._stop_limit()
        elif self.limit is None:
            self.limit = self.loop.call_later(ARRIVAL_SECONDS, self.transport.close)
            idle = {
                one: one.limit.when() for one in self.connections if isinstance(one, ImpatientProtocol) and one.limit
            }
            if len(idle) > MAX_IDLE:
                oldest = min(idle, key=idle.__getitem__)
                oldest._stop_limit()
                oldest.transport.abort()
                self.connections.discard(oldest)  # uvicorn counts them before it looks at the next request

    def _stop_limit(self) -> None:
        if self.limit:
            self.limit.cancel()
        self.limit = None
