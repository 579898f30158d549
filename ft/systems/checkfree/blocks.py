"""Access to the transformer blocks of one pipeline stage in a model of megatron-core, from which CheckFree rebuilds
stages.
"""

import re
from collections.abc import Sequence

import torch

from ft.base.errors import UserError
from ft.protection.training_state import learnt_buffers

_OF_BLOCK = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.(.+)$")


class StageBlocks:
    """The transformer blocks of one rank.

    Args:
        chunks: the model chunks of the stage: one, or several with the interleaved schedule. In the middle of the
            pipeline, the layers of each chunk lie between those of the same chunk of the two neighbour stages.
        whole: whether the stage must consist of blocks only, as a stage in the middle of the pipeline does.

    Raises:
        UserError: a middle stage has parameters that belong to no block.
    """

    def __init__(self, chunks: Sequence, *, whole: bool):
        found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        others = []
        for number, chunk in enumerate(chunks):
            for name, held in (*chunk.named_parameters(), *learnt_buffers(chunk)):
                place = _OF_BLOCK.search(name)
                if place is not None:
                    found.setdefault((number, int(place[1])), {})[place[2]] = held
                elif isinstance(held, torch.nn.Parameter):
                    others.append(name)
        if whole and others:
            raise UserError(
                f"a stage in the middle holds parameters of no transformer block: {', '.join(others[:3])}",
                "remove --ft-checkfree, because nothing could rebuild these parameters",
            )
        self._blocks = [found[place] for place in sorted(found)]

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self) -> list[dict[str, torch.Tensor]]:
        """Return the live parameters and learnt buffers (such as a router's expert bias) of each block.

        They are keyed by their names within the block.
        """
        return [{name: held.detach() for name, held in block.items()} for block in self._blocks]

    def is_sharded(self, name: str) -> bool:
        """Return whether tensor-parallel ranks hold different parts of the parameter with this name within a block."""
        return any(getattr(block.get(name), "tensor_model_parallel", False) for block in self._blocks)

    @torch.no_grad()
    def put(self, blocks: Sequence[dict[str, torch.Tensor]]) -> None:
        """Write tensors of the same names and shapes into the model.

        Raises:
            UserError: the names or shapes differ from those of the model.
        """
        given, own = [_shapes(block) for block in blocks], [_shapes(block) for block in self._blocks]
        if given != own:
            raise UserError(
                f"the {len(given)} blocks of the neighbours differ from the {len(own)} blocks of the lost stage",
                "give all stages the same number of layers of the same kind",
            )
        for block, new in zip(self._blocks, blocks, strict=True):
            for name, held in block.items():
                held.data.copy_(new[name])


def _shapes(block: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: held.shape for name, held in block.items()}
