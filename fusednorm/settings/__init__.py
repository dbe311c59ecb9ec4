"""Settings of the whole process."""
