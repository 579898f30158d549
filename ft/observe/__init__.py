"""What people look at: reports, status and diagnosis of runs."""
