"""Samples text from a trained model, in one process."""

from collections.abc import Iterator

import torch


@torch.no_grad()
def generate(
    chunk: torch.nn.Module,
    prompt: list[int],
    *,
    vocab_size: int,
    window: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yield token ids that continue ``prompt``, without end.

    Args:
        chunk: a whole GPT (one stage, no tensor parallelism).
        prompt: at least one token id.
        vocab_size: ids from here on are padding of the embedding and are never sampled.
        window: longest context in tokens.
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: sample among this many of the most likely tokens; 0: among all.
        seed: seed of the sampling.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while True:
        context = torch.tensor([ids[-window:]], dtype=torch.long).cuda()
        positions = torch.arange(context.shape[1], device=context.device).unsqueeze(0)
        logits = chunk(context, positions, None)[0, -1, :vocab_size].float().cpu()
        ids.append(sample(logits, temperature, top_k, generator))
        yield ids[-1]


def sample(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Return one sampled token id.

    Args:
        logits: logits of one position, [vocabulary].
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: sample among this many of the most likely tokens; 0: among all.
        generator: random number generator.
    """
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.numel())).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
