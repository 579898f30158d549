"""Access to the transformer blocks of one pipeline stage in a model of megatron-core, from which CheckFree rebuilds
stages.
"""

import re
from collections.abc import Iterator, Sequence

import torch

from ft.base.errors import UserError

_OF_BLOCK = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.(.+)$")


class StageBlocks:
    """The transformer blocks of one rank.

    Args:
        chunks: the model chunks of the stage. There must be exactly one, because CheckFree averages the layers directly
            before and after those of the lost stage.
        whole: whether the stage must consist of blocks only, as a stage in the middle of the pipeline does.

    Raises:
        UserError: there is more than one chunk, or a middle stage has parameters that belong to no block.
    """

    def __init__(self, chunks: Sequence, *, whole: bool):
        if len(chunks) != 1:
            raise UserError(
                f"{len(chunks)} model chunks on a pipeline stage: its neighbours hold no layers next to each of them",
                "remove --num-layers-per-virtual-pipeline-stage (the interleaved schedule), or --ft-checkfree",
            )
        found: dict[int, dict[str, torch.Tensor]] = {}
        others = []
        for name, held in (*chunks[0].named_parameters(), *_learnt_buffers(chunks[0])):
            place = _OF_BLOCK.search(name)
            if place is not None:
                found.setdefault(int(place[1]), {})[place[2]] = held
            elif isinstance(held, torch.nn.Parameter):
                others.append(name)
        if whole and others:
            raise UserError(
                f"a stage in the middle holds parameters of no transformer block: {', '.join(others[:3])}",
                "remove --ft-checkfree, because nothing could rebuild these parameters",
            )
        self._blocks = [found[number] for number in sorted(found)]

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


def _learnt_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state that training changes without a gradient: persistent floating-point buffers."""
    for prefix, module in chunk.named_modules():
        for name, held in module.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if held.is_floating_point() and own not in module._non_persistent_buffers_set:
                yield name, held


def _shapes(block: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: held.shape for name, held in block.items()}
