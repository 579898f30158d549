"""Reports on the folder of one run (``ft report``, ``ft status``): recoveries, goodput, timeline and current status."""
