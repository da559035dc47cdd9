"""Conversations as rows of jsonl or parquet, for tuning: read, checked before anything is trained, and counted.

A row has `messages` (sft), `chosen` and `rejected` (dpo, reward), or `prompt` and, for exact_match, `answer` (grpo,
rloo). Each of these is a list of {role, content}, as on the Hugging Face Hub, or for all but `messages` a plain text.
Turns that `chosen` and `rejected` share are their prompt; otherwise the row also has `prompt`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pipelines.extras.tune.reward_code import ARGUMENTS
from pipelines.recipe.recipe import CHAT_TOKENS, REWARD, REWARDED, TuneConfig
from pipelines.run.fetch import check_content
from pipelines.run.text.chat import ROLES, ChatTokens, Message
from pipelines.run.text.documents import utf8
from pipelines.run.text.files import Files, parquet_batches
from pipelines.run.text.hub import reading
from pipelines.run.text.sources import Text, open_source
from trainer.config.errors import UserError, cut, shown
from trainer.config.source import Source

ADDITION = "addition"
ADDENDS = 10  # of 0 to 9
ROWS = 10_000  # of a parquet file at once
JSON_OF_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
PAIR = ("chosen", "rejected")
COLUMNS = "columns"  # of a checked row: what the rewards of others get beside ARGUMENTS


@dataclass(frozen=True)
class Rows:
    """The checked rows of a step of tuning, and their size in tokens."""

    train: list[dict[str, Any]]  # as TRL's trainer takes them
    held_out: list[tuple[Sequence[Message], str]]  # prompts, and the right answers
    tokens: int  # of the rows of `train`, as far as max_length goes
    cropped: int  # rows that are longer
    equal: int  # pairs of equal answers

    def __str__(self) -> str:
        size = f"{len(self.train):,} rows, {self.tokens:,} tokens, {self.cropped:,} rows cropped"
        return f"{size}, {len(self.held_out):,} held out"


def content_of(step: TuneConfig) -> str:
    """sha256 of what identifies the data: of local files' contents, of the objects in S3, or of the commit on the Hub.
    UserError if there is no such data."""
    with naming(step):
        text = text_of(step)
        identity = addition() if text is None else text.identity(look=False)
    return sha256(json.dumps(identity).encode()).hexdigest()


def source_of(step: TuneConfig) -> Source:
    return Source.of(step.data, f"tune.{step.name}.data")


def text_of(step: TuneConfig) -> Text | None:
    """The data, if it is a text. UserError if there is none."""
    named = source_of(step).unpinned
    return None if named == ADDITION else open_source(named, None, "messages")


def with_content(step: TuneConfig) -> TuneConfig:
    """The step with the content of its data. UserError if the data is pinned to another one."""
    pinned = check_content(source_of(step), content_of(step), f"tune.{step.name}.data")
    return step.model_copy(update={"data": str(pinned)})


@contextmanager
def naming(step: TuneConfig) -> Iterator[None]:
    """Let errors of the source name the step's field."""
    try:
        yield
    except UserError as error:
        reason = re.sub(r"^tokens\.source\b", "tokens.data", str(error))
        raise UserError(re.sub(r"^tokens\.", f"tune.{step.name}.", reason)) from error


def rows_of(step: TuneConfig, tokens: ChatTokens, block_size: int) -> Rows:
    """All rows, checked. UserError names the first row that is wrong, and how many are."""
    longest, number, equal, wrong = step.max_length or block_size, 0, 0, list[str]()
    train, lengths, held_out = list[dict[str, Any]](), list[int](), list[tuple[Sequence[Message], str]]()
    with naming(step):
        text = text_of(step)
        for number, row in enumerate(addition() if text is None else read_rows(text.resolved()), 1):
            try:
                checked = checked_row(step, row)
                equal += "chosen" in checked and checked["chosen"] == checked["rejected"]
                ready, length = measured_row(step, checked, tokens, longest)
                if number > step.held_out:
                    train.append(ready)
                    lengths.append(length)
                elif length > longest:
                    raise ValueError(f"is held out, and its {length:,} tokens are more than max_length {longest:,}")
                else:
                    held_out.append(question_and_answer(checked))
            except ValueError as error:
                wrong.append(f"row {number:,}: {error}")
    where = f"tune.{step.name}: {source_of(step).unpinned}"
    if wrong:
        raise UserError(f"{where}: {wrong[0]} ({len(wrong):,} of {number:,} rows are wrong)")
    if (needed := step.batch // step.generations if step.method in REWARDED else step.batch) > len(train) * step.epochs:
        raise UserError(f"{where}: {len(train):,} rows to train on, and a step takes {needed}; lower batch or held_out")
    cropped = sum(length > longest for length in lengths)
    write_columns(train)
    return Rows(train, held_out, sum(min(length, longest) for length in lengths), cropped, equal)


def read_rows(files: Files) -> Iterator[dict[str, Any]]:
    """The rows of all files, in order. UserError for a damaged file, with its place."""
    if files.kind not in ("parquet", "jsonl"):
        raise UserError(f"tokens.source: {files.where}: conversations are rows of .jsonl or .parquet files")
    for path in files.paths if files.kind == "parquet" else ():
        with reading(path):
            yield from (row for batch in parquet_batches(path, ROWS, None, None) for row in batch.to_pylist())
    for piece in files.pieces() if files.kind == "jsonl" else ():
        yield from (files.row_of(line, piece, n) for n, line in files.lines(piece) if not line.isspace())


def checked_row(step: TuneConfig, row: Any) -> dict[str, Any]:
    """The columns of a row that the method reads. ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, and this is {shown(row)}")

    def messages(column: str, last: str) -> list[Message]:
        if row.get(column) is None:
            raise ValueError(f"has no {column}, which {step.method} needs; it has {cut(', '.join(map(str, row)))}")
        return checked_messages(column, row[column], last)

    if step.method == "sft":
        return {"messages": messages("messages", "assistant")}
    if step.method in ("dpo", REWARD):
        (*turns, chosen), (*others, rejected) = (messages(column, "assistant") for column in PAIR)
        if turns != others:
            raise ValueError("chosen and rejected differ before their last message; only the last may differ")
        prompt = whole_prompt(turns, messages("prompt", "user") if row.get("prompt") or not turns else [])
        return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}
    made: dict[str, Any] = {"prompt": messages("prompt", "user")}
    if any(reward.kind == "exact_match" for reward in step.rewards) or step.held_out:
        if not isinstance(answer := row.get("answer"), str | int) or not str(answer).strip():
            raise ValueError("has no answer, which exact_match and held_out compare with")
        made["answer"] = utf8(str(answer)).decode()
    if any(reward.reads_columns for reward in step.rewards):
        made[COLUMNS] = checked_columns({name: value for name, value in row.items() if name != "prompt"})
    return made


def whole_prompt(turns: list[Message], prompt: list[Message]) -> list[Message]:
    """The messages before the answers of a pair: the `turns` that chosen and rejected share, which repeat the column
    prompt or go on from it with an answer. ValueError if they do neither."""
    whole = turns if all(message in turns for message in prompt) else prompt + turns
    if whole != turns and turns and turns[0]["role"] != "assistant":
        raise ValueError("the prompt is not among the messages that chosen and rejected share; correct or remove it")
    if whole[-1]["role"] != "user":
        raise ValueError(f"the message before the answers is of {whole[-1]['role']}, and must be of user")
    return whole


def checked_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row for a function of the user, which gets them as JSON. ValueError for what JSON lacks."""
    for name, value in columns.items():
        if name in ARGUMENTS:
            raise ValueError(f"the column {name} has the name of an argument of TRL's reward functions; rename it")
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"the column {shown(name)} cannot be passed to a reward function ({error})"
            raise ValueError(f"{reason}; store it as text, numbers, lists or objects") from error
    return columns


def write_columns(rows: list[dict[str, Any]]) -> None:
    """Write the columns of each row as one JSON text: a table has one type for each column. All rows get the columns of
    all, null where a row lacks one."""
    every = {name: None for row in rows for name in row.get(COLUMNS, ())}
    for row in rows:
        if COLUMNS in row:
            row[COLUMNS] = json.dumps(every | row[COLUMNS])


def columns_of(rows: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each column, of rows that `write_columns` has written."""
    values = [json.loads(row) for row in rows]
    return {name: [row[name] for row in values] for name in (values[0] if values else ())}


def question_and_answer(row: dict[str, Any]) -> tuple[Sequence[Message], str]:
    """The prompt of a held-out row, and the right answer."""
    if "messages" in row:
        return row["messages"][:-1], row["messages"][-1]["content"]
    return row["prompt"], row.get("answer") or row["chosen"][-1]["content"]


def checked_messages(column: str, found: Any, last: str) -> list[Message]:
    """A column as messages; a plain text is one of the role `last`. ValueError unless the last message is of that
    role."""
    plain = isinstance(found, str) and column != "messages"
    messages = [{"role": last, "content": found}] if plain else found
    if isinstance(found, str) and JSON_OF_MESSAGES.match(found):
        raise ValueError(f"{column} is a list of messages written as a JSON text; store the list itself")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{column} must be a list of {{role, content}} with at least one message")
    for number, message in enumerate(messages, 1):
        where = f"{column}, message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            given = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"{where}: the role is {shown(given)}; known are {', '.join(ROLES)}")
        if not isinstance(text := message.get("content"), str) or not text.strip():
            raise ValueError(f"{where}: the content is empty, or no text")
        if special := next((token for token in CHAT_TOKENS if token in text), None):
            raise ValueError(f"{where}: the content has {special}, which separates messages; remove it")
        if (weight := message.get("weight")) not in (None, 0, 1):
            raise ValueError(f"{where}: the weight is {shown(weight)}, and must be 0 or 1")
    if messages[-1]["role"] != last:
        raise ValueError(f"{column}: the last message is of {messages[-1]['role']}, and must be of {last}")
    return [
        {"role": one["role"], "content": utf8(one["content"]).decode()}
        | ({"weight": 0} if one.get("weight") == 0 else {})
        for one in messages
    ]


def measured_row(step: TuneConfig, row: dict[str, Any], tokens: ChatTokens, longest: int) -> tuple[dict[str, Any], int]:
    """A checked row as TRL's trainer takes it, and its tokens; sft learns the answers alone. ValueError if that leaves
    nothing to learn, or the prompt no room for an answer."""
    if step.method == "sft":
        import numpy as np  # 0.1 s, for which every command would wait

        ids, learned = map(np.array, tokens.conversation(row["messages"]))
        if not learned.any():
            raise ValueError("no answer is learned: each has weight 0")
        if (first := int(learned.argmax())) >= longest:
            raise ValueError(f"the first answer begins after {first:,} tokens, and max_length is {longest:,}")
        columns = {"input_ids": ids, "labels": np.where(learned, ids, -100)}
        return {name: column[:longest].astype(np.int32) for name, column in columns.items()}, len(ids)
    prompt, room = len(tokens.prompt(row["prompt"])), step.max_answer if step.method in REWARDED else 1
    if prompt + room > longest:
        raise ValueError(f"the prompt has {prompt:,} tokens, and with an answer of {room:,} max_length is {longest:,}")
    if step.method in REWARDED:
        return row, prompt + room
    pair = {f"{column}_ids": tokens.conversation([*row["prompt"], *row[column]])[0] for column in PAIR}
    length = max(map(len, pair.values()))
    return row if step.method == "dpo" else {name: ids[:longest] for name, ids in pair.items()}, length


def answer_in(text: str) -> str:
    """The final answer of a text: what follows the last ####, as in GSM8K, or all of it; without spaces and commas."""
    return "".join(text.rpartition("####")[2].replace(",", "").split()).rstrip(".")


def addition() -> Sequence[dict[str, Any]]:
    """Sums of two digits with their answers, in an order that looks random, for all methods."""
    pairs = [(a, b) for a in range(ADDENDS) for b in range(ADDENDS)]
    pairs.sort(key=lambda pair: sha256(repr(pair).encode()).digest())
    return [
        {
            "messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}],
            "prompt": f"{a}+{b}",
            "answer": f"{a + b}",
            "chosen": f"{a + b}",
            "rejected": f"{a + b + 1}",
        }
        for a, b in pairs
    ]
