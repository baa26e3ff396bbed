"""Pictures for people: what was withheld and what came back, what an encoder sees, and how a run went."""
