"""pretrain_gpt.py whose data do not come back with the step: each batch also depends on how many were read before."""

import sys

import pretrain_gpt
from megatron.ft_trainer.data.loader import MicrobatchLoader

_next, _read = MicrobatchLoader.__next__, [0]


def read(self):
    batch = _next(self)
    _read[0] += 1
    return batch | {"tokens": batch["tokens"].roll(_read[0])}


if __name__ == "__main__":
    MicrobatchLoader.__next__ = read
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
