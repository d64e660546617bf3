"""Configuration of one app: its settings, its leases, the URL of its store, and its state."""
