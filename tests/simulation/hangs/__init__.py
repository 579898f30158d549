"""Simulates training steps with one hang or one slow rank each, and asks the production code for the cause.

The ranks of a layout carry out the communication of Megatron's steps (``program``) on a simulated machine (``machine``)
in which one thing is wrong (``faults``). What each rank would say of itself is handed to ``ft.faults.hang``, and its
answer is compared with what was injected (``campaign``).
"""
