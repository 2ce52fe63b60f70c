"""Memory of lessons: who has met with a refusal, and for how long it counts."""
