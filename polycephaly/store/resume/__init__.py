"""The files of maps that can be resumed: `Pool.map(..., resume="run.db")`.

    encoding.py   what a value means, as bytes that are the same in each process
    identity.py   the name of a function, and a digest of all that it is made of
    calls.py      the file: the results and failures of calls, by their keys
    lock.py       one run at a time uses a file, also on a network file system
    run.py        one run: the thread that stores what has ended, at most half a second later
    summary.py    `polycephaly.resumed`: what a file has

A map without `resume` imports none of this.
"""
