"""What a run will cost and can lose, said before it is started: ``ft plan``."""
