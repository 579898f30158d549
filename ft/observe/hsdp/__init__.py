"""Reports on the folder of an FT-HSDP run: surviving steps, audit of samples, replicas over time, stalls."""
