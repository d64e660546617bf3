"""Followers."""
