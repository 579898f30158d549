"""Implementation of ``ft plan policy``: show which kind of recovery the control plane uses after which failure."""
