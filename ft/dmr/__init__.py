"""DMR (SpareTrain): every operator is executed twice and compared, and silent data corruption is caught."""
