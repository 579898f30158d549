"""Transfer of a rank's state between the memories of two processes, over framed channels (:mod:`ft.net.framed`).

A state is pushed to a peer, as after every step to the peers that hold copies of a snapshot; or it is pulled by a rank
that has lost it or is behind. Both move a range of the state's bytes in chunks, each with its checksum
(:mod:`ft.state.transfer.server`). ``server`` stores pushed states and gives out pulled ones, ``push`` and ``pull`` are
the other ends. What is stored, given out and filled is behind :class:`ft.state.layout.StateMemory`, and the interfaces
of ``server``:

    push    ft.state.snapshot: peer copies, into alternating buffers
    pull    ft.state.snapshot: a copy or a snapshot, into a snapshot's buffer
            ft.state.fetch: the live tensors of healthy replicas, from several at once, into live tensors
"""
