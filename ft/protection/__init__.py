"""The interface between a trainer and the systems that protect its run; see :mod:`ft.protection.contract`."""
