"""Emulation that measures the latency of FT-HSDP's quorum at scale (``ft simulate quorum``; FT-HSDP, section 5).

A quorum is the set of replicas that execute the next training step together. The quorum server forms it from a report
of each replica's leader (rank 0), and sends it to the leaders. In each replica, a tree of relays passes the quorum on
to all ranks. Server, clients and relays are those of production, on one machine; only the ranks are emulated.
"""
