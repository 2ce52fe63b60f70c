"""Lessons: the mends that refusals of requests teach, read by a table of their known forms."""
