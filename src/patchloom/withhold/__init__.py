"""What is withheld from the encoder: pure functions, without parameters. Read `encoder_input` first."""
