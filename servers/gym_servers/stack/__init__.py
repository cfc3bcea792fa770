"""What a GymStack is made of: its spec, and the settings each of its processes starts with."""
