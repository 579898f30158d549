"""The published systems: each folder holds one paper's idea."""
