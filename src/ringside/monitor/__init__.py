"""Record, detect, explain: who holds the job up, since when, why, and what it costs."""
