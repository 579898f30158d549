"""Performs the save of a checkpoint: plan, write, commit, and remove old checkpoints.

After every phase in which a rank may fail, all ranks exchange their errors, so that the save succeeds or fails on all.
"""

import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megatron.ft_trainer.checkpointing import commit, inventory
from megatron.ft_trainer.checkpointing.channel import Channel, InThread, Pending
from megatron.ft_trainer.checkpointing.inventory import Manifest
from megatron.ft_trainer.checkpointing.plan import SavePlanning
from megatron.ft_trainer.checkpointing.writer import (
    ForkedWriter,
    InlineWriter,
    Writer,
    bytes_in_words,
    explain,
    free_bytes,
)


@dataclass(frozen=True)
class Outcome:
    """The result of a save; the same on all ranks.

    Args:
        step: the step that was to be saved.
        folder: folder of the checkpoints.
        error: why the save failed; None if it succeeded.
        seconds: duration on rank 0.
        bytes: size on disk.
        notes: further messages of rank 0.
    """

    step: int
    folder: Path
    error: str | None
    seconds: float = 0.0
    bytes: int = 0
    notes: tuple[str, ...] = ()


class Saver:
    """Saves into one folder.

    Args:
        folder: folder of the checkpoints.
        channel: exchanges messages with the other ranks.
        planning: plans what each rank writes.
        in_background: whether to write in a forked process (--async-save).
        keep_last: number of complete checkpoints to keep; None: all.
        distrusted: names of checkpoints that failed verification; the caller may add names later.
        log: prints a message.
    """

    def __init__(
        self,
        folder: Path,
        channel: Channel,
        planning: SavePlanning,
        *,
        in_background: bool,
        keep_last: int | None,
        distrusted: Collection[str],
        log: Callable[[str], None],
    ):
        self.folder, self._channel, self._planning = folder, channel, planning
        self._in_background, self._keep_last, self._distrusted, self._log = in_background, keep_last, distrusted, log

    def start(
        self, state_dict: dict, manifest: Manifest, started: float
    ) -> Generator[Pending, None, Outcome] | Outcome:
        """Capture the state and start to write it; without ``in_background``, write all of it.

        Args:
            state_dict: the state to save.
            manifest: the manifest, except the serial number and the files.
            started: ``time.monotonic()`` at which the save began.

        Returns:
            A generator that performs the rest of the save (see ``pending``), or the outcome if the save cannot be
                started. All ranks get the same of the two.
        """
        partial, serial, error = self.folder / inventory.partial_name(manifest.step), 0, None
        if self._channel.rank == 0:
            try:
                partial, serial = commit.prepare(self.folder, manifest.step)
            except OSError as failure:
                error = explain(failure, partial)
        plan = self._planning.plan(state_dict, self._channel.group)
        needs = self._channel.share({"bytes": plan.bytes, "error": error or plan.error})
        if self._channel.rank == 0:
            error = _first_error(needs) or self._refusal(sum(need["bytes"] for need in needs))
            if error is not None:
                commit.discard(partial)
        error, name = self._channel.broadcast((error, partial.name))
        if error is not None:
            return Outcome(manifest.step, self.folder, error)
        partial = self.folder / name
        writer = (ForkedWriter if self._in_background else InlineWriter)(partial, plan.files)
        return self._ending(writer, partial, replace(manifest, serial=serial), plan.metadata, started)

    def forget_plan(self) -> None:
        """Drop the plans kept from earlier saves, which is necessary if a rank has joined that has no plan yet."""
        self._planning.forget()

    def _ending(
        self, writer: Writer, partial: Path, manifest: Manifest, metadata: Metadata | None, started: float
    ) -> Generator[Pending, None, Outcome]:
        try:
            yield writer
            reports = yield from self._channel.gathering(writer.report)
        finally:
            writer.kill()
        outcome = None
        if reports is not None:
            outcome = yield from self._finishing(partial, manifest, metadata, reports)
            outcome |= {"seconds": time.monotonic() - started}
        outcome = yield from self._channel.broadcasting(outcome)
        return Outcome(manifest.step, self.folder, **{**outcome, "notes": tuple(outcome["notes"])})

    def _finishing(
        self, partial: Path, manifest: Manifest, metadata: Metadata, reports: list[dict]
    ) -> Generator[Pending, None, dict]:
        """Commit the checkpoint and remove old ones, on rank 0."""
        if (error := _first_error(reports)) is not None:
            commit.discard(partial)
            return {"error": error, "bytes": 0, "notes": []}

        def finish() -> dict:
            try:
                commit.commit(partial, manifest, metadata, reports)
            except Exception as failure:
                commit.discard(partial)
                what = explain(failure, partial) if isinstance(failure, OSError) else repr(failure)
                return {"error": what, "bytes": 0, "notes": []}
            size = sum(file["bytes"] for report in reports for file in report["files"])
            return {"error": None, "bytes": size, "notes": self._after(manifest.step)}

        if not self._in_background:
            return finish()
        thread = InThread(finish)
        yield thread
        return thread.result

    def _after(self, step: int) -> list[str]:
        """Write the tracker file and remove old checkpoints, on rank 0, after a commit.

        Return the errors, as texts; the new checkpoint is valid nevertheless.
        """
        try:
            commit.track(self.folder, step)
            failures = commit.retire(self.folder, self._keep_last, self._distrusted)
        except Exception as failure:
            return [explain(failure, self.folder) if isinstance(failure, OSError) else repr(failure)]
        return [f"could not remove {failure}" for failure in failures]

    def _refusal(self, needed: int) -> str | None:
        """Return why writing ``needed`` bytes would fail, or None. Only rank 0 calls it."""
        free = free_bytes(self.folder)
        about, left = bytes_in_words(needed), bytes_in_words(free)
        if free < needed:
            return f"{self.folder}: the disk is too full: about {about} needed, {left} free; nothing was written"
        if free < 2 * needed:
            self._log(
                f"checkpoint: {self.folder} has {left} free, room for this checkpoint of about {about} but not for "
                "one more"
            )
        return None


def _first_error(reports: list[dict]) -> str | None:
    """Return the first failed rank's error, with the number of other failed ranks."""
    failed = [rank for rank, report in enumerate(reports) if report.get("error")]
    if not failed:
        return None
    also = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
    return f"rank {failed[0]}: {reports[failed[0]]['error']}{also}"
