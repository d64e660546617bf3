"""What an operator does with the locks of an app: select, explain, count, release, examine.

Used by the command line and by Django's admin, and independent of how results are shown. Every
operation walks the store with its cursor or reads one key; none is on the path of a call or task.
"""
