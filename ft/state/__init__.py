"""The state of a rank and its transfer: process groups, snapshots, the placement of copies, and fetches by replicas."""
