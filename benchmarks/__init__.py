"""What uniqueness costs, measured side by side: ``make bench``."""
