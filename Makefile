# Entries for people: each is one command of CONTRIBUTING.md.
.PHONY: lint fast test long newest sim bench docs

lint:    ## style, format, import contracts, types
	bash -c '. tools/environment.sh && prepare_environment dev && check_sources'

fast:    ## lint, and the tests without processes
	bash tests/run.sh fast

test:    ## lint, and all tests but the long ones
	bash tests/run.sh

long:    ## lint, and the long tests
	bash tests/run.sh long

newest:  ## one of each kind of run on the newest Python, megatron-core and torch
	bash tests/newest.sh -m newest

sim:     ## the protocols in simulated clusters, 1,000 histories each
	bash -c '. tools/environment.sh && prepare_environment dev && \
	  python -m tests.simulation control --seeds 1000 --jobs 2 && python -m tests.simulation hsdp --seeds 1000 --jobs 2'

bench:   ## five benches: each prints a JSON line, for comparison by eye with those in tools/bench/results/
	bash -c '. tools/environment.sh && prepare_environment dev && \
	  for bench in recovery protection ftar hsdp_recovery step_time; do python tools/bench/$$bench.py || exit; done'

docs:    ## the pages of docs/ and of the public interface, as a site in build/site
	bash -c '. tools/environment.sh && prepare_environment docs && mkdir -p build/pages && \
	  python -m mkdocs build --strict'
