"""DMR (SpareTrain, ICLR 2026): every operator is executed twice and compared, in time that a run leaves idle, so that
silent data corruption is caught."""
