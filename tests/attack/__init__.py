"""An attack on everything the library reads and writes: damaged and forged files, kills at every write, races.

    python -m tests.attack                                     a minute, all parts
    python -m tests.attack --rounds 40 --json FILE             what benchmarks/results/attack-cpu.json was recorded with
    python -m tests.attack --only learner-supsup/retype/7      one case again, with its traceback
    pytest tests/attack --rounds 5

`kinds.py` has the kinds of file and how each is read, `damage.py` and `forge.py` what is done to them, `kills.py` the
runs that are killed, `races.py` the runs that meet in one folder, `sandbox.py` the processes all of it happens in,
`count.py` what counts as a clean error.
"""
