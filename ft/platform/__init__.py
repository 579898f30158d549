"""Access to the machine: processes, sockets, addresses, failure domains, Slurm, leader election through a file."""
