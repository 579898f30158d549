"""The functions of the checks: each takes a :class:`~ft.lab.selftest.table.Context` and returns (text, measured)."""
