"""What is claimed of the lock protocol, in a form that a machine can check. See README.md."""
