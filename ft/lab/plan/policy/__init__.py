"""``ft plan policy``: which rung of recovery serves after which failure."""
