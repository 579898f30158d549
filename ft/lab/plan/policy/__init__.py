"""Implementation of ``ft plan policy``: which kind of recovery is used after which failure."""
