"""DMR: every operator executed twice and compared, at the cost of a few per cent (SpareTrain)."""
