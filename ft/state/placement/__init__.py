"""Placement of peer copies, such that no single failure destroys a state and all its copies (DEADPOOL, section V-C).

assign      k holders for every logical rank, in k + 1 failure domains with the rank's own
problems    what a placement could not achieve, in words

All functions are pure functions of the map of ranks to nodes, with equal results on every rank. The failure domains of
the nodes (racks, switches, power feeds) are read by :mod:`ft.platform.topology`.
"""
