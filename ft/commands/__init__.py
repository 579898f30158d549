"""Subcommands of ``ft`` that combine several packages."""
