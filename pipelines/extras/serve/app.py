"""The application of `skytrain serve`: OpenAI's completions for one model, and a page to type into.

It is made for a look at a run on one's own machine: one generation at a time. It answers only requests that name it in
their Host header, and none that a foreign page sends: a page whose name resolves to this machine gets nothing. There is
no CORS, and no account. Bytes, tokens, texts, seconds and idle connections are bounded; uvicorn bounds all connections.

What clients send and read is in openai_api.py, and who may send how much in limits.py.
"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from pipelines.extras.serve.limits import Guard
from pipelines.extras.serve.openai_api import (
    MAX_TEXTS,
    Answer,
    ChatRequest,
    CompletionRequest,
    Refused,
    TextRequest,
    choice,
    event,
    refused,
    unseen,
    usage_of,
)
from pipelines.run.sample import Fragment, TextModel
from trainer.config.errors import UserError, cut

WAIT_SECONDS = 120.0  # then a waiting request is refused
GENERATION_SECONDS = 600.0  # of one request, with the time that its client takes to read
PAGE = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}


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


async def page(name: str, _: Request) -> Response:
    """A file of the page."""
    return FileResponse(Path(__file__).with_name("page") / name)
