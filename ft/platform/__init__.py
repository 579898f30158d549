"""The machine underneath: processes, sockets, addresses, failure domains, Slurm, leader election through a file."""
