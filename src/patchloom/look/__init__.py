"""Pictures of pretext tasks, of encoders and of the progress of runs."""
