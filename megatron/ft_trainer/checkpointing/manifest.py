"""The manifest of a checkpoint: a JSON file with its origin, sizes and checksums of its files, and its own checksum."""

import json
import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ft.base import bounded_json

FORMAT = 1


class ManifestError(ValueError):
    """Raised if a text is not a manifest, or is a damaged one."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of one file."""

    bytes: int
    crc32: int


@dataclass
class Manifest:
    """The content and origin of a checkpoint.

    Args:
        step: number of steps done when the checkpoint was saved.
        serial: position of the checkpoint in the order of saving in its folder, from 1.
        saved_at: UTC time of the save, ISO 8601.
        layout: sizes of the parallel dimensions of the run that saved it (``world_size``, ``tp``, ``pp``, ...).
        versions: versions of megatron-core and torch.
        optimizer: format of the optimizer state (``fully_reshardable``, ``dp_reshardable`` or ``replicated``, see
            ``content.optimizer_kind``); None: the checkpoint has no optimizer state.
        rng_grid: shape of the grid of random generator states (see ``rng.grid``); None: the checkpoint has none.
        run: the caller's information about the run: ``model``, ``options``, ``fingerprints``.
        files: name in the folder -> size and checksum, for every file except the manifest.
        ckpt_format: ``torch_dist``.
    """

    step: int
    serial: int
    saved_at: str
    layout: dict[str, Any]
    versions: dict[str, str]
    optimizer: str | None
    rng_grid: list[int] | None
    run: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    ckpt_format: str = "torch_dist"

    def to_json(self) -> str:
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(body), **body}, indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse what :meth:`to_json` wrote.

        Raises:
            ManifestError: the text is not JSON, not a manifest, of another format, or does not match its checksum.
        """
        try:
            body = bounded_json.loads(text, non_finite=True)
            checksum = body.pop("checksum")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ManifestError("it is not a manifest") from error
        if checksum != _checksum(body):
            raise ManifestError("its own checksum does not match")
        if body.pop("format", None) != FORMAT:
            raise ManifestError(f"its format is not {FORMAT}")
        try:
            body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
            return cls(**{f.name: body[f.name] for f in fields(cls) if f.name in body})
        except (AttributeError, KeyError, TypeError) as error:
            raise ManifestError(f"it lacks a value: {error}") from error


def _checksum(body: dict) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":"), default=str).encode())
