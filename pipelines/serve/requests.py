"""A request for completions in OpenAI's shape, checked and bounded.

Source: OpenAI's API reference, "Completions" (legacy). What this endpoint does not do is refused by name, and never
silently ignored.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

MAX_BYTES = 1 << 20  # of a request
MAX_TEXTS = 16  # prompts times n: the rows of a batch
MAX_STOPS = 4
PROBLEMS_SHOWN = 200  # characters

MAX_LOGPROBS = 5  # alternatives of a token

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
ManyIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Refused(Exception):
    """A request that is not served, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream has besides text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The fields of a request that this endpoint serves; unknown ones are errors. `top_k` is our addition."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str | Texts | TokenIds | ManyIds = ""  # ids are taken as they are, without an end-of-text in front
    max_tokens: int = Field(default=16, ge=0, le=1 << 20)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_TEXTS)
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted and not used
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    # Served at these values only.
    suffix: Literal[""] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


NOT_SERVED = ("suffix", "best_of", "presence_penalty", "frequency_penalty", "logit_bias")


def parse(body: bytes, model: str) -> CompletionRequest:
    """The request in a body. Refused if it is none, or one for another model than `model`."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {str(error)[:PROBLEMS_SHOWN]}") from error
    if not isinstance(values, dict):
        raise Refused(400, "the body is no JSON object")
    # OpenAI's clients may send null for "not given".
    given = {name: value for name, value in values.items() if value is not None}
    try:
        request = CompletionRequest.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = str(problem["loc"][0])[:PROBLEMS_SHOWN]
        if problem["type"] == "extra_forbidden":
            raise Refused(400, f"unrecognized request argument: {field}", field) from error
        if field in NOT_SERVED:
            raise Refused(400, f"{field}: not served here; leave it out", field, "not_served") from error
        if field == "prompt":
            one = "a string or a list of token ids"
            raise Refused(400, f"prompt: {one}, or a list of 1 to {MAX_TEXTS} of one kind", field) from error
        raise Refused(400, f"{field}: {problem['msg']}"[:PROBLEMS_SHOWN], field) from error
    if not request.max_tokens and not request.echo:
        raise Refused(400, "max_tokens: 0 is for `echo` alone; ask for 1 or more", "max_tokens")
    if request.stream and (request.echo or request.logprobs is not None):
        raise Refused(400, "stream: echo and logprobs are served without it", "stream", "not_served")
    if request.model not in (None, model):
        message = f"the model '{str(request.model)[:PROBLEMS_SHOWN]}' does not exist; this endpoint serves {model}"
        raise Refused(404, message, "model", "model_not_found")
    if len(request.prompts) * request.n > MAX_TEXTS:
        raise Refused(400, f"n: {len(request.prompts)} prompts x {request.n} are more than {MAX_TEXTS} texts", "n")
    return request
