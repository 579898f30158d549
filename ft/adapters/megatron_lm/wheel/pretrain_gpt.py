"""Trains a GPT with NVIDIA's trainer in the installed megatron-core; see :mod:`ft.adapters.megatron_lm.gpt`.

It stands in a folder of its own, because Python puts the folder of a script on its path.
"""

import importlib

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.start import is_first, load

if __name__ == "__main__":
    if is_first():
        print(tree.announcement(tree.installed_release()), flush=True)
    load(__file__)
    importlib.import_module("ft.adapters.megatron_lm.gpt").main()
