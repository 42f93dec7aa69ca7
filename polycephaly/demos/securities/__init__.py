"""The securities demo: the experiments of a talk of 2009, run again on this machine.

The task is to load five lists of securities: NYSE, AMEX, NASDAQ and ETFs from the symbol-directory
files of the exchange, and mutual funds over HTTP, one page per letter. Waiting for pages takes most
of the time, so several drones or threads load sooner.

    generate / DIR --> server (own process) --HTTP--> site --parse--> model
                                                        ^
                                 experiments: sequential, I, II, III, combined --> report
"""
