"""Results: measured values, the file that keeps them, claims about them, and verdicts on runs."""
