"""`primerl dashboard`: all runs of this user on one page.

`told`     answers about runs: the list, curves, comparisons, rollouts
`sources`  what it is read from: the readers of the page of one run, kept for the runs that are looked at
`server`   the HTTP server, for loopback by default; `web/` are its files, next to those of the page
"""
