"""Simulations that run the production decision code under failures too rare or too large for a test cluster."""
