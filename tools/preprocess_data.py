#!/usr/bin/env python3
"""Tokenises text into Megatron's indexed format.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus
    python tools/preprocess_data.py --input ~/src --include '*.py' --exclude test --output-prefix data/src

Then train with --data-path data/corpus.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout that is not installed

from ft.base.errors import UserError
from ft.base.options import add_flags, build
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.preprocess import PreprocessOptions, preprocess


def main(argv: list[str]) -> int:
    """Tokenize the input; return the exit code: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for options in (PreprocessOptions, TokenizerOptions):
        add_flags(parser, options)
    given = vars(parser.parse_args(argv))
    try:
        options = build(PreprocessOptions, given)
        started = time.monotonic()
        sidecar, skipped = preprocess(options, build(TokenizerOptions, given))
    except UserError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(
        f"{options.output_prefix}: {sidecar.documents} documents, {sidecar.tokens} tokens, "
        f"{sidecar.text_bytes / 1e6:.1f} MB of text, unigram entropy {sidecar.unigram_entropy:.4f} nats/token "
        f"({time.monotonic() - started:.1f} s)"
    )
    if skipped:
        print("skipped: " + ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
