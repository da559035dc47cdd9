"""ChatML: conversations as tokens, for tuning and for serving.

A message is `<|im_start|>ROLE`, a newline, its text and `<|im_end|>`; a conversation begins with <|endoftext|>, as
every document of the training does. The two special tokens take the ids after the tokenizer's: mostly rows of the
embedding that padding left free. TEMPLATE says the same to transformers and vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipelines.recipe.recipe import CHAT_TOKENS

if TYPE_CHECKING:
    import tiktoken

ROLES = ("system", "user", "assistant")
START, END = CHAT_TOKENS
# What stands between the generation marks is what supervised tuning learns: the answers, with the end of each.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Message = Mapping[str, object]  # role and content, and as for OpenAI's fine-tuning a weight: 0, or 1 or None


class ChatTokens:
    """Conversations as ids of a tokenizer and of the two tokens after its last one."""

    def __init__(self, encoding: "tiktoken.Encoding") -> None:
        self.encoding, self.n_vocab = encoding, encoding.n_vocab + len(CHAT_TOKENS)
        self.start, self.end = range(encoding.n_vocab, self.n_vocab)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and for each whether supervised tuning learns it: the ids of answers and their
        ends, but for answers with weight 0."""
        ids, learned = [self.encoding.eot_token], [False]
        for message in messages:
            answers = message["role"] == "assistant" and message.get("weight") != 0
            head = [self.start, *self.encoding.encode_ordinary(f"{message['role']}\n")]
            whole = [self.start, *self.encoding.encode_ordinary(f"{message['role']}\n{message['content']}"), self.end]
            same = next((n for n, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(head))
            ids += [*whole, *self.encoding.encode_ordinary("\n")]
            learned += [answers and n >= same for n in range(len(whole))]
            learned += [False] * (len(ids) - len(learned))
        return ids, learned

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids after which the model answers."""
        return [*self.conversation(messages)[0], self.start, *self.encoding.encode_ordinary("assistant\n")]
