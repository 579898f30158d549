"""The contract between a trainer and what protects it; see :mod:`ft.protection.contract`."""
