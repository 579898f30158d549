"""Reports on the folder of an FT-HSDP run: surviving steps, audit of samples, replicas over time, stalls.

In FT-HSDP a run consists of replicas: full copies of the model, each with its own workers. The replicas that take part
in a step are its quorum; a quorum server determines them. A replica that failed rejoins later, and fetches the training
state from the others.
"""
