"""Subcommands of ``ft``, this project's command line, that combine several packages: run, status, report, dmr."""
