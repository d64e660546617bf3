"""Canvas shapes with duplicates in them, beside the same shapes of tasks that are not unique."""
