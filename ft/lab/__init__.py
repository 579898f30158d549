"""Simulations, plans and estimates, which predict or test a run outside of production."""
