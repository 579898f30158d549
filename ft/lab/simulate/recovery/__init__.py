"""What a recovery has to rebuild at any number of ranks: the groups that megatron-core would make, judged by the code
that judges them in a run, and the time that takes, as far as measurements on a few ranks carry."""
