"""What is in force around calls, in the whole process or in a thread."""
