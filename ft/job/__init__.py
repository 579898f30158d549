"""Who lives and who decides: agents, the control plane, quorums, and the launcher of replicas."""
