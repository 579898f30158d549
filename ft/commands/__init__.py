"""Subcommands of ``ft`` that put several rooms together."""
