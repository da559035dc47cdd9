"""Text from a model: one token at a time, drawn from the top k."""

import torch

from trainer.model import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], tokens: int, seed: int = 0, temperature: float = 1.0, top_k: int = 50
) -> list[int]:
    """`tokens` token ids that continue `prompt` (not empty). Equal seeds give equal ids.

    The context is the last `block_size` tokens. There is no cache between tokens: this is for inspecting a model, not
    for serving it.
    """
    assert prompt, "a prompt has at least one token, such as end-of-text"
    device = model.wte.weight.device
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    ids = list(prompt)
    for _ in range(tokens):
        context = torch.tensor([ids[-model.config.block_size :]], device=device)
        logits = model.head(model.hidden(context)[:, -1])[0].float().cpu() / temperature
        best, at = logits.topk(min(top_k, model.config.vocab_size))
        choice = torch.multinomial(best.softmax(0), 1, generator=generator)
        ids.append(int(at[choice]))
    return ids[len(prompt) :]
