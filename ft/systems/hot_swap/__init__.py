"""Hot-swap (DEADPOOL): a standby takes over a dead worker's logical rank, from a copy of its state in memory.

:func:`layer.protect` returns a :class:`recovery_manager.RecoveryManager`, which calls a training loop again after every
recovery until the loop ends.
"""
