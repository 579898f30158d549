"""Communication between processes: channels, codecs, stores and streams, over TCP, Unix sockets and MPI."""
