"""Planning tools (``ft plan``): predict what failures cost a run and what state it can lose, before it is started."""
