"""Self-contained HTML reports of one or several runs."""
