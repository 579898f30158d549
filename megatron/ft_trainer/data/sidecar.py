"""The sidecar file ``P.meta.json``, which records how an indexed dataset ``P.bin``/``P.idx`` was made, and from which
inputs.

It is not called ``P.json``, because the text file itself often has that name.
"""

import json
import os
from dataclasses import asdict, dataclass, fields

from ft.base import bounded_json, files
from ft.base.errors import UserError

FORMAT_VERSION = 1
SUFFIX = ".meta.json"


@dataclass(frozen=True)
class Sidecar:
    """Facts about one indexed dataset.

    Attributes:
        tokenizer_type: value of --tokenizer-type.
        tokenizer_model: absolute path of the tokenizer's file, or None.
        fingerprint: fingerprint of the tokenizer.
        vocab_size: number of token ids.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        max_id: the largest token id in the dataset.
        unigram_entropy: entropy of the token frequencies in nats per token: the loss of a model that predicts from
            these frequencies alone.
        sources: number of input files.
        text_bytes: size of the tokenised text in bytes.
        bin_bytes: size of ``P.bin`` in bytes; a file of another size does not belong to this sidecar.
        idx_bytes: size of ``P.idx`` in bytes, for the same check.
        inputs_digest: SHA-256 of the tokenizer's fingerprint, the options, and the inputs' names, sizes and times.
        format_version: version of this file's format.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    vocab_size: int
    documents: int
    tokens: int
    max_id: int
    unigram_entropy: float
    sources: int
    text_bytes: int
    bin_bytes: int
    idx_bytes: int
    inputs_digest: str
    format_version: int = FORMAT_VERSION

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of a dataset; None if it has none (because Megatron-LM's own tool made it).

    Raises:
        UserError: the sidecar is unreadable, has another version, or does not fit the sizes of the dataset's files.
    """
    path = prefix + SUFFIX
    if not os.path.exists(path):
        return None
    fix = "make the dataset again with tools/preprocess_data.py, or remove the file if the dataset is sound without it"
    try:
        content = bounded_json.loads(files.read(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", fix) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}, this code reads {FORMAT_VERSION}", fix)
    if missing := {f.name for f in fields(Sidecar)} - set(content):
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}", fix)
    sidecar = Sidecar(**{f.name: content[f.name] for f in fields(Sidecar)})
    for suffix, expected in ((".bin", sidecar.bin_bytes), (".idx", sidecar.idx_bytes)):
        if os.path.exists(prefix + suffix) and (found := os.path.getsize(prefix + suffix)) != expected:
            raise UserError(f"{path} says {prefix}{suffix} has {expected} bytes, it has {found}", fix)
    return sidecar
