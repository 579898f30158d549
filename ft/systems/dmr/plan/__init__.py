"""Which operator is verified when: from a trace, in three phases, to a plan that a run follows."""
