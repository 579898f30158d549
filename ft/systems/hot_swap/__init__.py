"""Hot-swap (DEADPOOL): a dead worker's logical rank is taken over in mid-run, from a copy of its state in memory.

:func:`protect.protect` gives a :class:`recovery_manager.RecoveryManager`, which repeats a training loop after every
recovery until it ends.
"""
