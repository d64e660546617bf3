"""Producers and workers under random faults, and a checker that judges from their logs alone."""
