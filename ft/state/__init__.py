"""What a rank is and how it moves: process groups, snapshots, the placement of copies, fetches."""
