"""Requests and answers of OpenAI's completions and chats, as its clients send and read them.

Source: OpenAI's API reference, "Completions" (legacy) and "Chat". Arguments that this endpoint does not have are
refused by name, never silently ignored; a value that changes nothing is accepted.
"""

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from trainer.config.errors import cut

MAX_TEXTS = 16  # prompts times n
MAX_STOPS = 4
MAX_MESSAGES = 1000

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
