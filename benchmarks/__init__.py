"""What Polycephaly costs, beside the others: `python -m benchmarks`, from a clone.

    __main__    runs and says; each figure is taken by `alone` in a fresh process
    suite       the measurements: what is taken of whom, and what was promised
    peers       the others, behind one face
    tasks, work, arrays, starting     the measurements themselves
    processor_time    of controller and workers
    table       what is printed
    pairs       ... of two checkouts, or beside one peer, in alternating pairs

Green threads have a benchmark of their own, `python benchmarks/green.py`.
"""
