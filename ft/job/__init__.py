"""The supervision of a run: node agents, the control plane, the quorum service, and the launcher of replicas."""
