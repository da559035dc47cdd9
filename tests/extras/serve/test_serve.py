"""The completions endpoint: OpenAI's shapes, bounds, one generation at a time, and a page in a real browser."""

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import text_runs
import torch
import uvicorn
import waiting
from browser import COMPLAINTS, Browser, open_browser
from in_process import clean_environment
from tiny_models import model_of

from pipelines.extras.serve import limits
from pipelines.extras.serve.app import make_app, turn
from pipelines.extras.serve.limits import MAX_BYTES, ImpatientProtocol
from pipelines.extras.serve.openai_api import MAX_TEXTS, Refused
from pipelines.run.sample import GrowingText, TextModel
from pipelines.run.text.chat import ChatTokens
from pipelines.run.text.tokenizer import tokenizer, tokenizer_files
from pipelines.user.verbs.serve import listen
from trainer.base.store import LocalStore
from trainer.config.errors import UserError
from trainer.models.decoder import Decoder, Sampling
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT

browser = open_browser

CONTEXT = 8192
CONNECTIONS = 80
MODEL = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=CONTEXT, vocab_size=257)
END = 256


def endless(model: GPT) -> GPT:
    """The model, which never ends a document: one coordinate of the hidden state is 1, and only END's row sees it."""
    with torch.no_grad():
        model.ln_f.weight[0], model.ln_f.bias[0] = 0.0, 1.0
        model.wte.weight[:, 0] = 0.0
        model.wte.weight[END, 0] = -1e4
    return model


class Endpoint:
    """A server in a thread of this process, on a free port."""

    def __init__(self, model: TextModel | None = None, **limits: Any) -> None:
        self.plain = endless(model_of(MODEL))
        self.model = model or TextModel("speaker", None, Decoder(self.plain, "fp32", 257), tokenizer("bytes"))
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        app = make_app(self.model, ["localhost", "gpu-box"], **limits)
        bounds: dict[str, Any] = {
            "http": ImpatientProtocol,
            "limit_concurrency": CONNECTIONS,
            "timeout_graceful_shutdown": 1,
        }
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", **bounds))
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.socket]))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        kind = {"Content-Type": "application/json"} if body is not None else {}
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, kind | {name.replace("_", "-"): v for name, v in headers.items()})
        return connection.getresponse()

    def ask(self, path: str = "/v1/completions", body: Any = None, **headers: str) -> tuple[int, Any]:
        answer = self.send("POST" if body is not None else "GET", path, body, **headers)
        return answer.status, json.loads(answer.read())

    def raw(self, **body: Any) -> bytes:
        """The bytes of a request."""
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.address}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def events(self, body: Any) -> list[Any]:
        answer = self.send("POST", "/v1/completions", body | {"stream": True})
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        return [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]

    def until(self, what: Callable[[Any], bool]) -> None:
        waiting.until(lambda: what(self.ask("/health")[1]), "the endpoint is as expected", 30)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = Endpoint()
    yield started
    started.close()
    torch.set_num_threads(threads)


def text_of(endpoint: Endpoint, prompt: str, tokens: int, seed: int, sampling: Sampling, *stop: str) -> str:
    model = endpoint.model
    steps = model.continue_prompt(model.ids_of(prompt), tokens, [seed], sampling, stop)
    return "".join(one.text for step in steps for one in step)


ALL = Sampling(top_k=None)


# --- OpenAI's shapes


def test_a_completion_has_the_text_of_its_seed_and_the_usage(endpoint: Endpoint) -> None:
    asked = {"model": "speaker", "prompt": "def ", "max_tokens": 30, "seed": 4, "temperature": 0.5, "top_p": 0.9}
    status, answer = endpoint.ask(body=asked)
    text = text_of(endpoint, "def ", 30, 4, Sampling(0.5, None, 0.9))
    assert status == 200 and answer.pop("id").startswith("cmpl-") and abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "speaker",
        "choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 30, "total_tokens": 34},
    }
    assert endpoint.ask(body={"prompt": "def "})[1]["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_a_stream_says_the_same_text_and_ends_with_done(endpoint: Endpoint) -> None:
    asked = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 12, "seed": 3, "user": "ann", "stop": None}
    *events, done = endpoint.events(asked)
    assert done == "[DONE]"
    choices = [choice for event in map(json.loads, events) for choice in event["choices"]]
    whole = endpoint.ask(body=asked)[1]["choices"]
    expected = [text_of(endpoint, prompt, 12, 3 + n, ALL) for prompt, n in (("a", 0), ("a", 1), ("bc", 0), ("bc", 1))]
    assert [(choice["index"], choice["text"]) for choice in whole] == list(enumerate(expected))
    for number in range(4):
        mine = [choice for choice in choices if choice["index"] == number]
        assert "".join(choice["text"] for choice in mine) == whole[number]["text"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    *_, last, _ = endpoint.events(asked | {"stream_options": {"include_usage": True}})
    assert json.loads(last)["choices"] == [] and json.loads(last)["usage"]["completion_tokens"] == 48


def test_echo_and_logprobs_are_those_of_the_whole_text_in_one_pass(endpoint: Endpoint) -> None:
    asked: dict[str, Any] = {"prompt": ["dé", "xy" * 150], "max_tokens": 3, "logprobs": 2, "temperature": 0}
    plain, echoed = (endpoint.ask(body=asked | {"echo": echo})[1]["choices"] for echo in (False, True))
    for choice, alone, prompt in zip(echoed, plain, asked["prompt"], strict=True):
        assert choice["text"] == prompt + alone["text"] and choice["finish_reason"] == "length"
        found, ids = choice["logprobs"], endpoint.model.ids_of(prompt)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][-3:] == [max(top.values()) for top in found["top_logprobs"][-3:]]  # greedy
        assert alone["logprobs"] == {name: values[-3:] for name, values in found.items()} | {
            "text_offset": [offset - len(prompt) for offset in found["text_offset"][-3:]]
        }
        logits = GPT.forward(endpoint.plain, torch.tensor([ids]))[0].log_softmax(-1)
        expected = [logits[n, token].item() for n, token in enumerate(ids[1:])][1:]
        assert found["token_logprobs"][1:-3] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_lm_evals_model_of_completions_scores_through_the_endpoint(endpoint: Endpoint, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip)")
    pytest.importorskip("tenacity", reason="needs lm-eval[api] (pip)")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    for name, body in tokenizer_files(tokenizer("bytes"), CONTEXT).items():
        (tmp_path / name).write_bytes(body)
    address = f"http://{endpoint.address}/v1/completions"
    where = {"base_url": address, "model": "speaker", "tokenizer": str(tmp_path), "max_length": 128}
    pairs = [("def f", "(x)"), ("", "import os"), ("a =", " 1")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = LocalCompletionsAPI(**where, batch_size=2).loglikelihood(asked)
    for (context, ending), (loglikelihood, greedy) in zip(pairs, found, strict=True):
        ids, begin = [*(context.encode() or [END]), *ending.encode()], len(context.encode()) or 1
        logits = GPT.forward(endpoint.plain, torch.tensor([ids]))[0].log_softmax(-1)
        expected = [logits[n - 1, ids[n]].item() for n in range(begin, len(ids))]
        assert loglikelihood == pytest.approx(sum(expected), abs=1e-4)
        assert greedy == all(int(logits[n - 1].argmax()) == ids[n] for n in range(begin, len(ids)))


# --- bounds


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": CONTEXT}, 400, "prompt", f"maximum context length is {CONTEXT} tokens; a prompt has 1"),
        ({"prompt": [1, "a"]}, 400, "prompt", "valid string, a list of token ids, or a list of 1 to 16 of one kind"),
        ({"prompt": [[1], [257]]}, 400, "prompt", "257 is not a token id, 0 to 256"),
        ({"prompt": [-1]}, 400, "prompt", "-1 is not a token id"),
        ({"echo": True, "stream": True}, 400, "stream", "not with echo or logprobs"),
        ({"logprobs": 0, "stream": True}, 400, "stream", "not with echo or logprobs"),
        ({"prompt": ["a"] * 9, "n": 2}, 400, "n", f"9 prompts x 2 are more than {MAX_TEXTS} texts"),
        ({"top_p": "0.5"}, 400, "top_p", "valid number"),
        ({"logprobs": 6}, 400, "logprobs", "less than or equal to 5"),
        ({"stop": list("abcde")}, 400, "stop", "at most 4 items"),
        ({"stop": [1]}, 400, "stop[0]", "valid string"),
        (
            {"frequency_penalty": 0.5},
            400,
            "frequency_penalty",
            "unrecognized request argument: frequency_penalty; leave it",
        ),
        ({"best_of": 2}, 400, "best_of", "leave it out, or give 1"),
        ({"stream_options": {"a": 1}}, 400, "stream_options.a", "unrecognized request argument: stream_options.a"),
        ({"model": "\ud83c"}, 404, "model", "does not exist"),
        ({"\ud83c": 1}, 400, None, ""),
        (b'"text"', 400, None, "must be a JSON object"),
        (b"1", 400, None, "must be a JSON object"),
        ({"model": "gpt-4"}, 404, "model", "the model 'gpt-4' does not exist; this endpoint serves speaker"),
        (b"{", 400, None, "must be a JSON object"),
        (b"[]", 400, None, "must be a JSON object"),
        (b" " * (MAX_BYTES + 1), 413, None, "at most 1,048,576 bytes"),
    ],
)
def test_what_is_not_served_is_refused_in_openais_shape(
    endpoint: Endpoint, body: Any, status: int, param: str | None, message: str
) -> None:
    found, answer = endpoint.ask(body=body)
    assert found == status and set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"] and len(error["message"]) < 400


def test_only_the_paths_of_openais_completions_are_there(endpoint: Endpoint) -> None:
    (model,) = endpoint.ask("/v1/models")[1]["data"]
    assert endpoint.ask("/v1/models/speaker") == (200, model) and model["id"] == "speaker" and not model["chat"]
    assert endpoint.ask("/health") == (200, {"status": "ok", "model": "speaker", "busy": False})
    status, answer = endpoint.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert status == 404 and "chat is not served" in answer["error"]["message"]
    assert endpoint.send("HEAD", "/health").status == 200
    assert endpoint.ask("/docs")[0] == endpoint.ask("/openapi.json")[0] == 404  # FastAPI's load foreign scripts
    status, answer = endpoint.ask("/v1/completions")
    assert status == 405 and "Method Not Allowed" in answer["error"]["message"]


@pytest.fixture(scope="module")
def chatty() -> Iterator[Endpoint]:
    """An endpoint of a model with the ids of ChatML."""
    encoding, plain = tokenizer("bytes"), GPT(MODEL.model_copy(update={"vocab_size": 259, "block_size": 190}))
    plain.initialize(3)
    model = TextModel("speaker", None, Decoder(plain, "fp32", 259), encoding, ChatTokens(encoding))
    started = Endpoint(model=model)
    yield started
    started.close()


def test_openais_own_client_chats_streams_and_reads_errors(chatty: Endpoint) -> None:
    openai = pytest.importorskip("openai", reason="needs openai (pip)")
    client = openai.OpenAI(base_url=f"http://{chatty.address}/v1", api_key="any", max_retries=0)
    (model,) = client.models.list().data
    asked = {"model": model.id, "messages": [{"role": "user", "content": "3+4"}], "max_tokens": 30, "seed": 5}
    whole = client.chat.completions.create(**asked)
    prompt = ChatTokens(tokenizer("bytes")).prompt(asked["messages"])
    ours = chatty.model.continue_prompt(prompt, 30, [5], ALL)
    text = "".join(one.text for step in ours for one in step)
    assert (whole.object, whole.choices[0].message.role) == ("chat.completion", "assistant")
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason in ("length", "stop")
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {part.object for part in parts} == {"chat.completion.chunk"} and parts[-1].usage == whole.usage
    assert "".join(one.delta.content for part in parts for one in part.choices) == text
    with client.chat.completions.stream(**asked, stop=text[3:5]) as stream:  # it joins the deltas, roles and all
        joined = stream.get_final_completion().choices[0].message
    assert (joined.role, joined.content) == ("assistant", text.partition(text[3:5])[0])
    two = [part.choices[0] for part in client.chat.completions.create(**asked, n=2, stream=True)]
    assert [one.index for one in two if one.delta.role] == [0, 1]
    stopped = client.chat.completions.create(**asked, stop=text[3:5])
    assert stopped.choices[0].message.content == text.partition(text[3:5])[0]
    special = client.completions.create(model=model.id, prompt=[257, 65], max_tokens=0, echo=True, logprobs=5)
    assert (special.choices[0].text, special.choices[0].logprobs.text_offset) == ("<|im_start|>A", [0, 12])
    assert (special.usage.prompt_tokens, special.usage.completion_tokens) == (2, 0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**asked | {"model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(**asked | {"max_tokens": CONTEXT})


def test_arguments_that_change_nothing_are_accepted_as_clients_send_them(chatty: Endpoint) -> None:
    def answer(messages: Any, **more: Any) -> dict[str, Any]:
        asked = {"messages": messages, "max_tokens": 12, "seed": 5}
        status, found = chatty.ask("/v1/chat/completions", asked | more)
        assert status == 200, found
        return found["choices"][0]["message"]

    system, question = {"role": "system", "content": "Add.\nBriefly."}, {"role": "user", "content": "3+4"}
    first = answer([system, question])
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "tools": [], "tool_choice": "none"}
    neutral |= {"store": False, "response_format": {"type": "text"}, "logprobs": False, "metadata": None}
    assert answer([system, question], **neutral) == first
    parts = [{"type": "text", "text": "Add."}, {"type": "text", "text": "Briefly."}]
    assert answer([{"role": "developer", "content": parts}, question | {"name": None}]) == first
    dumped = first | {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert answer([question, dumped, question]) == answer([question, first, question])
    assert chatty.ask(body={"prompt": "a", "max_tokens": 2, "best_of": 1, "suffix": "", "logit_bias": {}})[0] == 200


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "'developer', 'user' or 'assistant'"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "a valid string, or a list of text parts"),
        ({"messages": [USER, USER | {"content": [5]}]}, "messages[1].content[0]", "valid dictionary"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "'text'"),
        ({"messages": [USER | {"name": "ann"}]}, "messages[0].name", "unrecognized request argument"),
        ({"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages", "maximum context length"),
        (
            {"messages": [USER], "tools": [{}]},
            "tools",
            "unrecognized request argument: tools; leave it out, or give []",
        ),
        ({"messages": [USER], "store": True}, "store", "or give false"),
        ({"messages": [USER], "logprobs": 1}, "logprobs", "unrecognized request argument"),
    ],
)
def test_a_wrong_conversation_is_refused_in_openais_shape(
    chatty: Endpoint, body: Any, param: str, message: str
) -> None:
    status, answer = chatty.ask("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param) and message in answer["error"]["message"]


def test_a_text_ends_at_a_special_token_of_chatml() -> None:
    text = GrowingText(tokenizer("bytes"))
    assert [text.add(token) for token in (65, 258)] == [False, True] and (text.take(), text.finish) == ("A", "stop")


def test_a_foreign_page_gets_nothing(endpoint: Endpoint) -> None:
    body = {"max_tokens": 1}
    for headers in (
        {"Host": f"evil.example:{endpoint.port}"},
        {"Host": f"127.0.0.1.evil.example:{endpoint.port}", "Origin": f"http://127.0.0.1.evil.example:{endpoint.port}"},
        {"Host": "2130706433"},  # 127.0.0.1 for some resolvers
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
    ):
        status, answer = endpoint.ask(body=body, **headers)
        assert status == 403 and "this server answers" in answer["error"]["message"]
    assert endpoint.ask(body=body, Origin=f"http://{endpoint.address}")[0] == 200
    for host in ("192.0.2.7:80", f"[::1]:{endpoint.port}", "GPU-box:8000", "localhost"):  # as a forwarded port has it
        assert endpoint.ask(body=body, Host=host, Origin=f"http://{host}")[0] == 200
    assert endpoint.ask(body=body, Content_Type="text/plain")[0] == 415  # a form or a no-cors fetch sends this
    answer = endpoint.send("OPTIONS", "/v1/completions", Origin=f"http://{endpoint.address}")
    assert answer.status == 405 and not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.headers["x-frame-options"] == "DENY"


def test_silent_connections_are_closed_and_lock_nobody_out(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARRIVAL_SECONDS", 0.5)
    post, get = endpoint.raw(max_tokens=1), f"GET /health HTTP/1.1\r\nHost: {endpoint.address}\r\n\r\n".encode()
    starts = (b"", b"GET ", post[:90], post[:-1], get + b"GET ")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), 30)) for _ in range(10)]
        for number, connection in enumerate(silent[:8]):
            connection.sendall(starts[number % len(starts)])
        for connection in silent:
            while connection.recv(65536):
                pass
    with socket.create_connection(("127.0.0.1", endpoint.port), 30) as connection:
        connection.sendall(get + post[:-1])
        while connection.recv(65536):
            pass
    assert endpoint.ask(body={"max_tokens": 1})[0] == 200


def test_idle_connections_make_room_for_requests(endpoint: Endpoint) -> None:
    def ask(_: int) -> int:
        return endpoint.send("GET", "/health").status

    with contextlib.ExitStack() as stack:
        for number in range(200):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), 60))
            idle.sendall(endpoint.raw(max_tokens=1)[: 24 * (number % 6)])
        with ThreadPoolExecutor(12) as pool:
            assert [*pool.map(ask, range(24))] == [200] * 24
        assert endpoint.ask(body={"max_tokens": 1})[0] == 200


# --- one at a time


def started_stream(endpoint: Endpoint) -> http.client.HTTPResponse:
    """A stream that would take minutes."""
    return endpoint.send("POST", "/v1/completions", {"max_tokens": 8000, "n": 4, "stream": True})


def test_a_request_waits_for_the_one_before_and_more_than_uvicorn_takes_are_refused(endpoint: Endpoint) -> None:
    first = started_stream(endpoint)
    first.readline()
    more = [started_stream(endpoint) for _ in range(CONNECTIONS - 1)]
    assert endpoint.send("POST", "/v1/completions", {"max_tokens": 1}).status == 503
    for stream in (*more, first):  # the others are gone while they wait
        stream.close()
    waiting.until(lambda: endpoint.send("POST", "/v1/completions", {"max_tokens": 1}).status == 200, "served again", 30)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_leaves_ends_its_generation(endpoint: Endpoint, stream: bool, requests: int) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
        client.sendall(endpoint.raw(max_tokens=8000, n=4, stream=stream) * requests)
        endpoint.until(lambda health: health["busy"])
    endpoint.until(lambda health: not health["busy"])


def test_a_client_that_sends_too_much_during_an_answer_loses_its_connection(endpoint: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), 30) as client:
        client.sendall(endpoint.raw(max_tokens=8000, n=4))
        endpoint.until(lambda health: health["busy"])
        with contextlib.suppress(ConnectionError):
            client.sendall(bytes(2 * MAX_BYTES))
        endpoint.until(lambda health: not health["busy"])


def test_the_requests_of_a_connection_are_answered_in_order_while_the_next_one_arrives(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ARRIVAL_SECONDS", 1.0)
    last = endpoint.raw(max_tokens=2)
    with socket.create_connection(("127.0.0.1", endpoint.port), 300) as client:  # 2 s of generation on an idle machine
        client.sendall(endpoint.raw(max_tokens=1000) + last[:-1])
        endpoint.until(lambda health: health["busy"])
        time.sleep(1.2)  # the arrival of the next request would be overdue, if its time counted during the answer
        monkeypatch.setattr(limits, "ARRIVAL_SECONDS", 300.0)  # a busy machine sends the rest late
        for tokens, rest in ((1000, last[-1:]), (2, b"")):
            with http.client.HTTPResponse(client) as answer:
                answer.begin()
                assert json.loads(answer.read())["usage"]["completion_tokens"] == tokens
            client.sendall(rest)


def test_waits_and_generations_have_limits_of_time() -> None:
    async def check() -> None:
        lock = asyncio.Lock()
        async with turn(lock, 0.05):
            with pytest.raises(Refused, match=r"not served within 0.05 s") as late:
                async with turn(lock, 0.05):
                    raise AssertionError
        assert (late.value.status, lock.locked()) == (503, False)

    asyncio.run(check())
    short = Endpoint(seconds=0.0)
    try:
        status, answer = short.ask(body={"max_tokens": 5})
        assert status == 503 and answer["error"]["code"] == "timeout"
        first, done = short.events({"max_tokens": 5})
        assert json.loads(first)["error"]["code"] == "timeout" and done == "[DONE]"
    finally:
        short.close()


# --- the command


def test_ctrl_c_ends_the_server_with_0_even_while_it_answers(store: LocalStore, tmp_path: Path) -> None:
    text_runs.finish(store, tmp_path, model_of(text_runs.RECIPE.model))
    command = [sys.executable, "-m", "pipelines.cli", "serve", text_runs.RUN, "--store", store.uri, "--port", "0"]
    environment = clean_environment(SKYTRAIN_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            found = re.search(rf"http://(127\.0\.0\.1:\d+)/  \({text_runs.RUN}, ", line)
            assert found, line
            while True:
                connection = http.client.HTTPConnection(found[1], timeout=60)
                with contextlib.suppress(ConnectionRefusedError):  # it is bound, and does not listen yet
                    connection.request(
                        "POST", "/v1/completions", b'{"stream": true}', {"Content-Type": "application/json"}
                    )
                    break
                time.sleep(0.05)
            assert connection.getresponse().readline().startswith(b"data: ")
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, errors) == (0, "")


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; choose another one"):
            listen("127.0.0.1", port)
    with pytest.raises(UserError, match="--host nowhere.invalid --port 80: "):
        listen("nowhere.invalid", 80)


# --- the page


def until(browser: Browser, expression: str) -> None:
    assert browser.js(
        f"new Promise((done) => {{ const end = Date.now() + 30000, look = () => ({expression}) ? done(true) : "
        "Date.now() > end ? done(false) : setTimeout(look, 20); look(); })"
    ), expression


SET_VALUES = "for (const [id, value] of Object.entries({})) document.getElementById(id).value = value;"


def test_the_page_is_a_chat_that_enter_and_ctrl_enter_send_to_a_model_that_was_tuned(
    chatty: Endpoint, browser: Browser
) -> None:
    browser.screen(900)
    browser.visit(f"http://{chatty.address}/")
    until(browser, "document.body.className === 'chat'")
    assert browser.js("document.getElementById('max_tokens').value") == "95"  # half of its context
    turns: list[dict[str, str]] = []
    for question, ctrl in (("3+4", False), ("<b>5</b>", True)):
        turns.append({"role": "user", "content": question})
        values = {"prompt": question, "max_tokens": 20, "seed": 4, "top_k": "", "temperature": 0}
        browser.js(SET_VALUES.format(json.dumps(values)) + "document.getElementById('prompt').focus()")
        browser.press("Enter", ctrl)
        until(browser, "!document.getElementById('go').disabled && document.getElementById('prompt').value === ''")
        asked = {"messages": turns, "max_tokens": 20, "seed": 4, "temperature": 0}
        turns.append(chatty.ask("/v1/chat/completions", asked)[1]["choices"][0]["message"])
    shown = browser.js("[...document.querySelectorAll('#answer span')].map((one) => one.textContent)")
    assert shown == [turn["content"] for turn in turns] and browser.heard(*COMPLAINTS) == []


def test_the_page_streams_text_as_text_and_stops(endpoint: Endpoint, browser: Browser, tmp_path: Path) -> None:
    prompt = "<b>def</b> <img src=x onerror=alert(1)>"
    browser.screen(900)
    browser.visit(f"http://{endpoint.address}/")

    until(browser, "document.title === 'speaker'")
    browser.js(SET_VALUES.format(json.dumps({"prompt": prompt, "max_tokens": 60, "seed": 4, "top_k": ""})))
    browser.js("document.getElementById('go').click()")
    until(browser, "document.getElementById('note').textContent.startsWith('60 tokens, ')")
    shown = browser.js("document.getElementById('answer').textContent")
    assert shown == prompt + text_of(endpoint, prompt, 60, 4, ALL)
    assert browser.js("document.querySelectorAll('#answer *').length") == 2

    browser.js(SET_VALUES.format(json.dumps({"max_tokens": 8000})))
    browser.js("document.getElementById('go').click()")
    until(browser, "document.querySelector('.assistant').textContent.length > 20")
    browser.js("document.getElementById('stop').click()")
    until(browser, "document.getElementById('note').textContent === 'stopped'")
    endpoint.until(lambda health: not health["busy"])
    browser.js(SET_VALUES.format(json.dumps({"max_tokens": 9000})))
    browser.js("document.getElementById('go').click()")
    until(browser, "document.getElementById('note').className === 'bad'")
    assert "maximum context length" in browser.js("document.getElementById('note').textContent")
    complaints = browser.heard(*COMPLAINTS)
    assert [entry for entry in complaints if "400" not in json.dumps(entry)] == []  # the refused request, by chromium
