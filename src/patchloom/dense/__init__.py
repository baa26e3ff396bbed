"""What segmentation and detection share."""
