"""The securities demo: the talk's experiments, re-run end to end on this machine.

Task: load five lists of securities (NYSE, AMEX, NASDAQ, ETFs from the exchange's symbol-directory
files; mutual funds over HTTP, one page per letter). Waiting for pages dominates, so more heads load
sooner.

    generate / DIR --> server (own process) --HTTP--> site --parse--> model
                                                        ^
                                 experiments: sequential, I, II, III, combined --> report

This file imports nothing: the server process starts through it.
"""
