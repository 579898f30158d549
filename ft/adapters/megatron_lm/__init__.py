"""Protects the trainer of NVIDIA's Megatron-LM: a checkout's own ``pretrain_gpt.py``, without a change to its files.

A checkout is a folder with ``megatron/training/training.py`` beside the script. ``ft run`` recognises it
(:mod:`ft.adapters.megatron_lm.tree`), checks that the functions that are wrapped are there
(:mod:`ft.adapters.megatron_lm.seams`), and starts ``python -m ft.adapters.megatron_lm`` in each worker
(:mod:`ft.adapters.megatron_lm.__main__`), which wraps these functions and runs the script. In such a process the module
``megatron.training`` is the checkout's, so nothing here imports this project's trainer.
"""
