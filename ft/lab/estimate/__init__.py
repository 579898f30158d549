"""What DMR will cost before any machine exists: analytic costs of a model, a cluster and a layout as a profile."""
