"""Hot-swap (DEADPOOL): a standby takes over a dead worker's logical rank, from a copy of its state in memory.

:func:`ft.systems.hot_swap.layer.protect` returns a :class:`ft.systems.hot_swap.recovery_manager.RecoveryManager`, which
calls a training loop again after every recovery until the loop ends.
"""
