"""What a run is, for whoever reads or writes one: settings, folder, checkpoints, its task, and what it trains on."""
