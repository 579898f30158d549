"""Planner for the cost of failures (DEADPOOL, section IV), with restarts from a checkpoint and with hot-swap."""
