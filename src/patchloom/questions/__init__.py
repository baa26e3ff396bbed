"""Questions, one module each: targets, loss, measure beside baselines, and pictures."""
