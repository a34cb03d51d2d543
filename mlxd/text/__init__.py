"""Text on the daemon's side: templates, tokens, detokenising, stop strings."""
