"""Views: they only read records and schedules, and never change a run."""
