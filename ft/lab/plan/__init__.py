"""Planning tools (``ft plan``): predict before a run is started what failures will cost and what state may be lost."""
