"""Where peer copies go so that no single failure takes a state and all copies of it (paper, section V-C).

topology    which hosts fail together: racks, switches, power feeds, read from a file
assign      k holders for every logical rank, in k + 1 failure domains with the rank's own
problems    what of that could not be had, in words

Pure functions of who sits where; the same on every rank.
"""
