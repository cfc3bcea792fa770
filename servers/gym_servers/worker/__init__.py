"""What runs inside of an inference engine's own process: it cuts generations where their tokens are made."""
