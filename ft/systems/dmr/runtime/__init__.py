"""DMR while a run trains: operators are executed a second time as the strategy says, and compared."""
