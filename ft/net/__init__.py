"""How processes talk: channels, codecs, stores and streams, over TCP, Unix sockets and MPI."""
