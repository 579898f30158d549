"""pretrain_gpt.py in which fetches of a state are slow, the first is cut off, and workers print when they rehearse."""

import sys
import time

import pretrain_gpt
from ft.state.fetch.server import StateOffer

FETCH_S, CUT_OFF = 0.6, []
REHEARSED = "rehearsed at "

_visit, _run = StateOffer.visit, pretrain_gpt.run


def slowly(self, peer):
    """Delay a fetch before its first byte is sent, once it is registered; the first until its state is withdrawn."""
    visit = _visit(self, peer)
    time.sleep(FETCH_S)
    while not CUT_OFF and not self._closed:
        time.sleep(0.01)
    CUT_OFF.append(peer)
    return visit


def run(options) -> int:
    from megatron import patches

    patches.apply()
    from megatron.ft_trainer import trainer

    rehearse = trainer.rehearse

    def said(job, samples: int) -> None:
        rehearse(job, samples)
        print(f"{REHEARSED}{time.time()}", flush=True)

    trainer.rehearse = said
    return _run(options)


if __name__ == "__main__":
    StateOffer.visit, pretrain_gpt.run = slowly, run
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
