"""The functions of the checks: each takes a :class:`~ft.lab.selftest.values.Context` and returns (text, measured)."""
