"""Communication between the processes of a run: message channels, framed channels, rendezvous stores and byte streams.

They use TCP, Unix sockets or MPI. The handshake authenticates peers by the run's secret token.
"""
