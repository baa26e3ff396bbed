"""Which pretext task suits some images: each is trained for the same time, and only what is told apart is told."""
