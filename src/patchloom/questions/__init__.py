"""What is asked of the encoder, one file a question: its targets, loss, measure beside baselines, and pictures."""
