"""Policies: what makes two calls the same work, and what happens to a duplicate. Pure.

``policy`` is the value, ``fields`` checks each of its fields, ``layers`` merges what call, task,
annotations and app give, ``task_options`` reads the options of a task, ``ojs`` reads and writes
documents of the Open Job Spec.
"""
