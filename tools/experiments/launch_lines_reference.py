"""Parse launch lines with the parser of a Megatron-LM tree; started by ``launch_lines.py``, the tree first on the path.

Reads a JSON object (name -> words and world size) from standard input, and prints one with the fields of
megatron-core's configuration, or with the parser's complaint.
"""

import contextlib
import importlib.machinery
import json
import os
import sys
import types


class _Nothing:
    """Stands for whatever a GPU compiler offers, which parsing does not use."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *given, **__):
        return given[0] if given and callable(given[0]) else self

    def __getitem__(self, _):
        return self


def main() -> int:
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = _answers(asked)
    print(json.dumps(answers))
    return 0


def _answers(asked: dict) -> dict:
    import torch
    import torch._dynamo
    import torch._inductor.runtime.triton_compat  # before a stand-in for Triton is there

    _stand_in_for_triton()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: 9
    found = {}
    for name, line in asked.items():
        sys.argv = ["pretrain_gpt.py", *_expanded(line["words"])]
        os.environ |= {"WORLD_SIZE": str(line["world"]), "RANK": "0"}
        try:
            args = arguments.parse_args()
            arguments.validate_args(args)
            config = arguments.core_transformer_config_from_args(args)
            found[name] = {key: _plain(value) for key, value in vars(config).items()}
        except (Exception, SystemExit) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _expanded(words: list[str]) -> list[str]:
    """Return the words as the tests' shell gives them: a list in brackets is several words."""
    out: list[str] = []
    for word in words:
        is_list = word.startswith("[") and word.endswith("]") and " " in word
        out += word[1:-1].split() if is_list else [word.replace("\\", "")]
    return out


def _stand_in_for_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        for name in ("triton", "triton.language"):
            module = types.ModuleType(name)
            module.__getattr__ = lambda attribute: _Nothing()  # type: ignore[method-assign]
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
            sys.modules[name] = module


def _plain(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return name if name is not None else repr(value)


if __name__ == "__main__":
    sys.exit(main())
