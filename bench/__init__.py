"""Each operation beside what a user would write instead: ``python -m bench``, ``docs/bench.md``."""
