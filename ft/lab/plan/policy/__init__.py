"""A job after a fault, and the situations in which the control plane decides on its recovery."""
