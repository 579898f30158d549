"""The transformer blocks of a stage, out of a model of megatron-core and back into it."""

import re
from collections.abc import Sequence

import torch

from ft.errors import UserError

_OF_BLOCK = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.(.+)$")


class StageBlocks:
    """Of one rank.

    Args:
        chunks: model chunks, one: which layers a lost stage held must be those between its neighbours'.
        whole: the stage consists of blocks and nothing else, as one in the middle does.

    Raises:
        UserError: there is more than one chunk, or something in a middle stage that is no block's.
    """

    def __init__(self, chunks: Sequence, *, whole: bool):
        if len(chunks) != 1:
            raise UserError(
                f"{len(chunks)} model chunks on a pipeline stage: its neighbours hold no layers next to each of them",
                "drop the interleaved schedule (--num-layers-per-virtual-pipeline-stage), or --ft-checkfree",
            )
        found: dict[int, dict[str, torch.nn.Parameter]] = {}
        others = []
        for name, parameter in chunks[0].named_parameters():
            place = _OF_BLOCK.search(name)
            if place is None:
                others.append(name)
            else:
                found.setdefault(int(place[1]), {})[place[2]] = parameter
        if whole and others:
            raise UserError(
                f"a stage in the middle holds parameters of no transformer block: {', '.join(others[:3])}",
                "drop --ft-checkfree: nothing could rebuild them",
            )
        self._blocks = [found[number] for number in sorted(found)]

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self) -> list[dict[str, torch.Tensor]]:
        """The live parameters of each block by their names within it."""
        return [{name: held.detach() for name, held in block.items()} for block in self._blocks]

    def is_sharded(self, name: str) -> bool:
        """Whether tensor-parallel ranks hold different parts of the parameter; the same in every block that has it."""
        return any(getattr(block.get(name), "tensor_model_parallel", False) for block in self._blocks)

    @torch.no_grad()
    def put(self, blocks: Sequence[dict[str, torch.Tensor]]) -> None:
        """Writes parameters of the same names and shapes into the model.

        Raises:
            UserError: they are of another model.
        """
        told, own = [_shapes(block) for block in blocks], [_shapes(block) for block in self._blocks]
        if told != own:
            raise UserError(
                f"the neighbours' {len(told)} blocks are not as the lost stage's {len(own)}",
                "give all stages as many layers of one kind",
            )
        for block, new in zip(self._blocks, blocks, strict=True):
            for name, parameter in block.items():
                parameter.data.copy_(new[name])


def _shapes(block: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: held.shape for name, held in block.items()}
