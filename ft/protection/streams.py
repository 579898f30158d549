"""Shows each replica of the model only its own part of a dataset, as a dataset.

A stream (``ft.protection.contract.Stream``) maps the positions 0, 1, 2, ... of one replica to indices in the dataset.
"""

import torch

from ft.protection.contract import Stream


class StreamView(torch.utils.data.Dataset):
    """The samples of ``base`` that belong to ``stream``, in the order of the stream."""

    def __init__(self, base, stream: Stream):
        self.base, self.stream = base, stream

    def follow(self, stream: Stream) -> None:
        """Switch to another stream.

        Call ``seek`` on the data loaders afterwards, because they have prefetched samples of the old stream.
        """
        self.stream = stream

    def __len__(self) -> int:
        return self.stream.within(len(self.base))

    def __getitem__(self, position: int):
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of the {len(self)} of {self.stream}")
        return self.base[self.stream.index(position)]
