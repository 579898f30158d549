"""The worker's side of the fault path: a seat in the run, groups that follow the epochs, steps that survive faults.

``session.attach()`` gives a :class:`session.Session`, the process's place in the run; ``protect()`` gives a
:class:`guard.Guard`, which carries a training run through faults, and for which :class:`plain.Unguarded` stands in
where there is no fault tolerance.
"""
