"""`primerl dashboard`: all runs of this user on one page.

`told`     what is told of runs: the list, curves, comparisons, rollouts
`sources`  what it is read from: the readers of the page of one run, kept for the runs that are looked at
`server`   the HTTP server, for loopback unless told otherwise; `web/` are its files, next to those of the page
"""
