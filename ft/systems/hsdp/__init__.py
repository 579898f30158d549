"""FT-HSDP: replicas (full copies of the model) fail as a unit. The others continue to train, and a replica that returns
fetches its state from them.
"""
