"""Integrations with other packages. Each is imported only by those who name it."""
