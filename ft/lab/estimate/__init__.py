"""Estimate the cost of DMR without hardware: build a profile from analytic costs of a model, a cluster and a layout."""
