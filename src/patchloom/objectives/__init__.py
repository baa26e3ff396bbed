"""What is asked of the encoder: targets, losses, and the yardsticks that say whether an answer is any good."""
