"""The published matrix: what ran with what, and the page that says so."""
