"""What only a GPU can tell, in one command: ``bench/gpu_check.sh``, ``docs/gpu.md``.

Only the parts themselves, in processes of their own, need the library: it's built first.
"""
