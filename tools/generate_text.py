"""Generate text with a trained model: ``python tools/generate_text.py --load CHECKPOINTS --prompt 'def '``.

The model and its tokenizer are those that the checkpoint describes. They are loaded into one process, whatever the
layout of the training run was.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ft.base.errors import UserError
from megatron.ft_trainer.logging.quiet import quieten


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
    from megatron.ft_trainer.restore import generate, load_for_inference

    trained = load_for_inference(arguments.load)
    prompt = trained.tokenizer.tokenize(arguments.prompt)
    if not prompt:
        raise UserError("the prompt has no tokens", "give --prompt some text")
    drawn = generate(
        trained.chunk,
        prompt,
        vocab_size=trained.tokenizer.vocab_size,
        window=trained.options.data.seq_length,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    until_end = itertools.takewhile(lambda token: token != trained.tokenizer.eod, drawn)
    print(trained.tokenizer.detokenize([*prompt, *itertools.islice(until_end, arguments.tokens)]))
    destroy()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
