"""What an operator does with the locks of an app, without a word of how it is shown.

The command line and Django's commands both stand on this. Everything here walks with the
store's cursor or reads one key; nothing of it is on the way of a call or of a task.
"""
