"""Adds fault tolerance to the trainer in a checkout of NVIDIA's Megatron-LM, without a change to the checkout's files.

A checkout is a folder with ``megatron/training/training.py`` beside the script. ``ft run`` recognises it
(:mod:`ft.adapters.megatron_lm.tree`), checks that the functions to be wrapped exist
(:mod:`ft.adapters.megatron_lm.hooks`), and starts ``python -m ft.adapters.megatron_lm`` in each worker
(:mod:`ft.adapters.megatron_lm.__main__`), which wraps these functions and runs the script. In such a process the module
``megatron.training`` is the checkout's, so no module of this package imports this project's trainer.
"""
