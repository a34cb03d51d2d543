"""What ships in contrib/, checked with the tools that will read it."""
