"""CheckFree and CheckFree+: a pipeline stage that is lost everywhere is rebuilt from its neighbours."""
