"""What the folder of an FT-HSDP run tells: which steps survived, every sample once, replicas over time, stalls."""
