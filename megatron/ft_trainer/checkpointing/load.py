"""Loads a checkpoint: chooses one, verifies it, checks that it fits, and loads it into model and optimizer."""

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from ft.base.errors import FallbackError, UserError
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import content, inventory, optimizer_state, rng
from megatron.ft_trainer.checkpointing.channel import Channel
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.checkpointing.inventory import Entry, Manifest
from megatron.patches import stored_types
from megatron.patches.releases import load_strategy


class NoUsableCheckpoint(FallbackError, UserError):
    """There are checkpoints, or one was requested by its step, but none can be used."""


@dataclass
class LoadReport:
    """The result of loading a checkpoint.

    Args:
        path: the checkpoint's folder.
        step: the checkpoint's step (with --finetune the run starts at 0 nevertheless).
        layout: sizes of the parallel dimensions of the run that saved the checkpoint.
        rejected: checkpoints that were not usable, one text each: name and problem.
        optimizer: whether optimizer and schedule were loaded.
        rng: ``restored``, ``reseeded`` (the saved states belong to another layout) or ``untouched``.
        verify_s: seconds for verifying files.
        seconds: seconds in total.
    """

    path: Path
    step: int
    layout: dict[str, Any]
    rejected: list[str] = field(default_factory=list)
    optimizer: bool = False
    rng: str = "untouched"
    verify_s: float = 0.0
    seconds: float = 0.0


class Loader:
    """Loads checkpoints from one folder. All ranks have to call every method.

    Args:
        folder: folder of the checkpoints.
        channel: exchanges messages with the other ranks.
        options: checkpoint flags.
        run: as ``run_info`` of :class:`Checkpointer`.
        data_parallel_random_init: as for :class:`Checkpointer`.
        distrusted: receives the names of checkpoints that fail verification.
        log: prints a message; called on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        channel: Channel,
        options: CheckpointOptions,
        run: Mapping[str, Any],
        *,
        data_parallel_random_init: bool,
        distrusted: set[str],
        log: Callable[[str], None],
    ):
        self._folder, self._channel, self._options, self._run = folder, channel, options, run
        self._random_init = data_parallel_random_init
        self._distrusted, self._log = distrusted, log

    def load(self, state: TrainState, model: list, optimizer: Any, scheduler: Any, seed: int) -> LoadReport | None:
        """Load a checkpoint; see :meth:`Checkpointer.load`."""
        started = time.monotonic()
        found = self._choose()
        if found is None:
            return None
        manifest, report = found
        if (notice := check_run(report.path, manifest, self._run, self._options.finetune)) is not None:
            self._say(notice)
        check_format(report.path, manifest)
        kind = None
        if not self._options.finetune:
            ours = content.optimizer_kind(optimizer, self._options.dist_ckpt_optim_fully_reshardable)
            kind = check_optimizer(report.path, manifest, ours, _sizes_here())
        shape, _, _ = rng.grid(self._random_init)
        wants_rng = not self._options.finetune and manifest.rng_grid is not None
        with_rng = wants_rng and shape == manifest.rng_grid
        with _types_checked(report.path):
            wanted = content.to_load(
                model, optimizer, kind=kind, with_rng=with_rng, data_parallel_random_init=self._random_init
            )
            loaded = self._read(report.path, wanted)
            content.apply(loaded, model, optimizer, scheduler, with_optimizer=kind is not None)
        if not self._options.finetune:
            content.apply_state(loaded, state)
        if with_rng:
            rng.restore(loaded[rng.KEY])
        elif wants_rng:
            rng.reseed(seed, manifest.step, self._random_init)
            fits, here = _grid(manifest.rng_grid), _grid(shape)
            self._say(f"generator states are for {fits}, not {here}: reseeded from seed and step")
        report.optimizer = kind is not None
        report.rng = "restored" if with_rng else "reseeded" if wants_rng else "untouched"
        report.seconds = time.monotonic() - started
        return report

    def _choose(self) -> tuple[Manifest, LoadReport] | None:
        """Return the newest checkpoint that passes verification, or the one of --ckpt-step; None if there is none."""
        entries, tracked = self._entries()
        candidates = self._candidates(entries)
        if candidates is None:
            return None
        rejected = [f"{e.name}: {e.problem}" for e in entries if not e.complete and e not in candidates]
        started = time.monotonic()
        for entry in candidates:
            manifest, bad = self._verified(entry)
            if not bad:
                self._explain_choice(entry, rejected, tracked)
                spent = time.monotonic() - started
                path = self._folder / entry.name
                return manifest, LoadReport(path, entry.step, manifest.layout, rejected=rejected, verify_s=spent)
            self._distrusted.add(entry.name)
            rejected.append(f"{entry.name}: {'; '.join(bad)}")
        raise NoUsableCheckpoint(
            f"no usable checkpoint in {self._folder}:" + "".join(f"\n    {line}" for line in rejected),
            "restore a sound copy of one, or give a --load folder without checkpoints to start from random weights; "
            "those of NVIDIA's trainer are loaded by it (--nvidia-trainer, or ft run with its checkout)",
        )

    def _entries(self) -> tuple[list[Entry], str | None]:
        """Return the checkpoints that rank 0 finds in the folder, and the content of the tracker file.

        Raises:
            UserError: rank 0 cannot read the folder.
        """
        answer = None
        if self._channel.rank == 0:
            try:
                found = [vars(e) for e in inventory.scan(self._folder, may_be_missing=True)]
                answer = {"entries": found, "tracker": inventory.tracked_step(self._folder)}
            except NotADirectoryError:
                answer = {"error": f"--load {self._folder}: it is a file, not a folder"}
            except OSError as error:
                answer = {"error": f"--load: {error.filename or self._folder}: {error.strerror}"}
        answer = self._channel.broadcast(answer)
        if "error" in answer:
            raise UserError(answer["error"], "give a folder that this user can read")
        entries = [Entry(**e) for e in answer["entries"]]
        if not entries and answer["tracker"] is not None:
            raise NoUsableCheckpoint(
                f"{self._folder / inventory.TRACKER} names step {answer['tracker']}, and there is no checkpoint",
                "restore the checkpoint, or remove that file to start from random weights",
            )
        return entries, answer["tracker"]

    def _candidates(self, entries: list[Entry]) -> list[Entry] | None:
        step = self._options.ckpt_step
        if step is not None:
            chosen = sorted((e for e in entries if e.step == step), key=lambda e: not e.complete)
            if not chosen or not chosen[0].complete:
                why = f": {chosen[0].problem}" if chosen else ""
                steps = ", ".join(str(e.step) for e in entries if e.complete) or "none"
                raise NoUsableCheckpoint(
                    f"{self._folder / inventory.checkpoint_name(step)} is no checkpoint{why}",
                    f"complete ones are of steps: {steps}",
                )
            return chosen
        if not entries:
            if self._options.exit_on_missing_checkpoint:
                raise UserError(
                    f"--load {self._folder} holds no checkpoint, and --exit-on-missing-checkpoint was given",
                    "give the folder of a run that saved one",
                )
            self._say(f"{self._folder} holds none: starting from random weights")
            return None
        return inventory.newest_first(entries)

    def _verified(self, entry: Entry) -> tuple[Manifest | None, list[str]]:
        """Return the checkpoint's manifest, and the problems with its files. All ranks share the work."""
        text, bad = None, []
        path = self._folder / entry.name
        if self._channel.rank == 0:
            try:
                text = inventory.read_manifest(path).to_json()
            except (OSError, ValueError) as error:
                bad = [f"{inventory.MANIFEST}: {error}"]
        text = self._channel.broadcast(text)
        manifest = Manifest.from_json(text) if text is not None else None
        if manifest is not None:
            names = inventory.share_of(manifest.files, self._channel.size, self._channel.rank)
            bad = inventory.problems(path, manifest.files, names)
        return manifest, sorted(line for lines in self._channel.share(bad) for line in lines)

    def _read(self, path: Path, wanted: dict) -> dict:
        """Read ``wanted`` from the checkpoint, after checking that it has these tensors in these shapes."""
        strategy = load_strategy(path)
        stored = load_sharded_metadata(str(path), strategy)
        if "optimizer" in wanted and not optimizer_state.has_moments(each.key for each in stored.values()):
            wanted["optimizer"] = optimizer_state.without_moments(wanted["optimizer"])
            self._say(f"{path.name} was saved before the optimizer's first step: the optimizer begins without moments")
        different = self._channel.share(tensor_differences(wanted, stored))
        if any(different):
            lines = dict.fromkeys(line for lines in different for line in lines)
            raise UserError(
                f"{path} does not fit this model; the first differences:" + "".join(f"\n    {x}" for x in lines),
                "give the options that the checkpoint was saved with, or another --load",
            )
        return dist_checkpointing.load(wanted, str(path), strategy)

    def _explain_choice(self, entry: Entry, rejected: list[str], tracked: str | None) -> None:
        if rejected:
            listed = "".join(f"\n    {line}" for line in rejected)
            self._say(f"not usable:{listed}\n  loading {entry.name} instead")
        elif tracked not in (None, str(entry.step)) and self._options.ckpt_step is None:
            self._say(
                f"{inventory.TRACKER} names step {tracked}, the newest complete checkpoint is of step {entry.step}: "
                f"loading that (--ckpt-step {tracked} asks for the other)"
            )

    def _say(self, text: str) -> None:
        if self._channel.rank == 0:
            self._log(f"checkpoint: {text}")


@contextlib.contextmanager
def _types_checked(path: Path) -> Iterator[None]:
    """In this context, a pickle that names what no checkpoint needs is a UserError about the checkpoint at ``path``."""
    problem: BaseException | None = None
    try:
        yield
    except pickle.UnpicklingError as error:
        problem = error
    except CheckpointException as error:  # torch's, with those of all ranks
        problem = next((each for each, _ in error.failures.values() if isinstance(each, pickle.UnpicklingError)), None)
        if problem is None:
            raise
    if problem is not None:
        raise UserError(
            f"{path} is refused, because to read it could execute code: {stored_types.reason(problem)}",
            "load a checkpoint from a source that you trust",
        ) from problem


def _grid(shape: list[int]) -> str:
    return sizes_in_words(dict(zip(("pp", "tp", "dp"), shape, strict=False)))


def _sizes_here() -> dict[str, int]:
    return {
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


# The model options that decide which tensors exist, their shapes, or what their values mean.
SHAPING = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "vocab_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
)
FORMATS = ("torch_dist", "fully_reshardable", "dp_reshardable", "replicated")
_SHOWN = 5


def check_run(path: Path, manifest: Manifest, run: Mapping[str, Any], finetune: bool) -> str | None:
    """Check that the checkpoint at ``path`` belongs to this run's model and tokenizer.

    Args:
        path: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        run: as ``run_info`` of ``Checkpointer``.
        finetune: value of --finetune.

    Returns:
        a notice for the user if the checkpoint was trained on other data, otherwise None.

    Raises:
        UserError: the model or the tokenizer differs.
    """
    different = option_differences(manifest.run.get("model", {}), run.get("model", {}))
    if different:
        raise UserError(
            f"{path} is of another model:" + "".join(f"\n    {line}" for line in different),
            "give the options that the checkpoint was saved with, or another --load",
        )
    there, here = manifest.run.get("fingerprints", {}), run.get("fingerprints", {})
    differ = [name for name in ("tokenizer", "data") if name in there and name in here and there[name] != here[name]]
    if "tokenizer" in differ and not finetune:
        raise UserError(
            f"{path} was trained with tokenizer {there['tokenizer']}, this run has {here['tokenizer']}",
            "use the same tokenizer, or --finetune to go on with another one on purpose",
        )
    return f"{path.name} was trained on other data than this run's; sample counts go on" if "data" in differ else None


def check_format(path: Path, manifest: Manifest) -> None:
    """Check that this trainer reads the formats of the checkpoint at ``path`` and of its optimizer state.

    Raises:
        UserError: it does not.
    """
    strange = [f for f in (manifest.ckpt_format, manifest.optimizer or "replicated") if f not in FORMATS]
    if strange:
        raise UserError(
            f"{path} is in the format {strange[0]}, which this trainer does not read",
            "save it again with the release of this project that wrote it, without --ckpt-format torch",
        )


def check_optimizer(path: Path, manifest: Manifest, ours: str | None, here: Mapping[str, int]) -> str | None:
    """Return the format of the optimizer state at ``path`` (see ``content``); None if this run has no optimizer.

    Args:
        path: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        ours: the format in which this run would store its own optimizer state; None: it has no optimizer.
        here: this run's sizes ``pp``, ``tp`` and ``ep``.

    Raises:
        UserError: the checkpoint has no optimizer state, or the state cannot be loaded into this run's optimizer.
    """
    if ours is None:
        return None
    advice = "add --finetune to begin at step 0 with these weights and a fresh optimizer"
    if manifest.optimizer is None:
        raise UserError(f"{path} holds no optimizer state", advice)
    stored = manifest.optimizer
    if (stored == "replicated") != (ours == "replicated"):
        raise UserError(
            f"{path} holds a {stored} optimizer state, and this run's is {ours}",
            f"switch --use-distributed-optimizer, or {advice}",
        )
    there = {name: manifest.layout.get(name, 1) for name in here}
    if stored == "dp_reshardable" and here != there:
        raise UserError(
            f"{path} was saved with --no-dist-ckpt-optim-fully-reshardable from {sizes_in_words(there)} "
            f"and does not load into {sizes_in_words(here)}",
            f"use the old sizes, or {advice}",
        )
    return stored


def sizes_in_words(sizes: Mapping[str, int]) -> str:
    """Format sizes of parallel dimensions, for example as "PP2 x TP1"."""
    return " x ".join(f"{name.upper()}{size}" for name, size in sizes.items())


def option_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the options in ``SHAPING`` that both sides have and that differ, one line each."""
    return [
        f"{name}: {saved[name]} in the checkpoint, {current[name]} in this run"
        for name in SHAPING
        if name in saved and name in current and _comparable(saved[name]) != _comparable(current[name])
    ]


def tensor_differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return the first tensors and objects that the checkpoint lacks or holds in another shape, one line each.

    Args:
        wanted: sharded state dict to load.
        stored: the result of core's ``load_sharded_metadata``, by key.
    """
    shapes = {s.key: tuple(s.global_shape) for s in stored.values() if isinstance(s, ShardedTensor)}
    keys = {s.key for s in stored.values()}
    found: dict[str, str] = {}
    for shard in _shards(wanted):
        if shard.key not in keys:
            found[shard.key] = f"{shard.key}: not in the checkpoint"
            continue
        # core allows a mismatch of tensors that are padded along the vocabulary, whose sizes check_run has compared
        is_tensor = isinstance(shard, ShardedTensor) and not shard.allow_shape_mismatch
        if is_tensor and shard.key in shapes and shapes[shard.key] != tuple(shard.global_shape):
            there, here = _shape(shapes[shard.key]), _shape(shard.global_shape)
            found[shard.key] = f"{shard.key}: {there} in the checkpoint, {here} in this run"
    return [found[key] for key in sorted(found)][:_SHOWN]


def _shards(wanted: Mapping[str, Any]) -> list[ShardedBase]:
    shards = []
    for value in nested_values(wanted):
        if isinstance(value, ShardedTensorFactory):
            shards += [s for s in nested_values(_listed(value.build())) if isinstance(s, ShardedBase)]
        elif isinstance(value, ShardedBase):
            shards.append(value)
    return shards


def _listed(built: Any) -> Any:
    return built if isinstance(built, dict | list) else [built]


def _shape(sizes: Any) -> str:
    return " x ".join(str(s) for s in sizes) or "a scalar"


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
