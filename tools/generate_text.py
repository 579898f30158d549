"""Generate text with a trained model: ``python tools/generate_text.py --load CHECKPOINTS --prompt 'def '``.

The model and its tokenizer are those that the checkpoint describes. They are loaded into one process, whatever the
layout of the training run was.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from ft.base.errors import UserError
from megatron.ft_trainer.logging.quiet import quieten

if TYPE_CHECKING:
    from megatron.ft_trainer.restore import Trained


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, help="a --save folder of pretrain_gpt.py")
    parser.add_argument("--prompt", default="def ", help="what the text starts with")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, help="draw among so many tokens; 0: among all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    quieten()
    try:
        write_text(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_text(arguments: argparse.Namespace) -> None:
    from megatron import patches

    patches.apply()
    from megatron.ft_trainer.initialize import destroy
    from megatron.ft_trainer.restore import load_for_inference

    trained = load_for_inference(arguments.load)
    ids = trained.tokenizer.tokenize(arguments.prompt)
    if not ids:
        raise UserError("the prompt has no tokens", "give --prompt some text")
    for token in itertools.islice(drawn(trained, ids, arguments), arguments.tokens):
        if token == trained.tokenizer.eod:
            break
        ids.append(token)
    print(trained.tokenizer.detokenize(ids))
    destroy()


def drawn(trained: "Trained", ids: list[int], arguments: argparse.Namespace) -> Iterator[int]:
    """Yield tokens, each drawn by a whole GPT (one stage, no tensor parallelism) as the one that follows ``ids``."""
    import torch

    generator = torch.Generator().manual_seed(arguments.seed)
    while True:
        context = torch.tensor([ids[-trained.options.data.seq_length :]], dtype=torch.long).cuda()
        positions = torch.arange(context.shape[1], device=context.device).unsqueeze(0)
        with torch.no_grad():
            # ids from the end of the vocabulary on are padding of the embedding
            logits = trained.chunk(context, positions, None)[0, -1, : trained.tokenizer.vocab_size].float().cpu()
        if arguments.top_k:
            least = logits.topk(min(arguments.top_k, logits.numel())).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        odds = torch.softmax(logits / (arguments.temperature or 1), dim=-1)
        yield int(torch.multinomial(odds, 1, generator=generator) if arguments.temperature else logits.argmax())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
