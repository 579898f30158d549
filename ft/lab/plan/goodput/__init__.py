"""One model of a training run under failures, in wall time, and the commands that read an answer from it."""
