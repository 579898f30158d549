"""What looks ahead of a run: simulations, plans and estimates. Nothing below imports it."""
