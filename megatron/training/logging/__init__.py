"""What a run says: ``runlog`` writes it, the others work it out; ``quiet`` keeps dependencies from talking over it."""
