"""Finds the cause of a hang: which rank the others wait for, in which operation, and where that rank is instead.

An inspection is what all ranks say of themselves at one moment (``inspection``). From it follows who waits for whom
(``graph``), and from the structure of that graph who is at fault (``causes``): the wait-for graphs of FT-HSDP, section
2.3. All of this is pure; the inspections are made by ``ft.worker`` and ``ft.job.agent``, or read from the dumps of
torch's flight recorder by ``ft.observe.diagnose``.
"""
