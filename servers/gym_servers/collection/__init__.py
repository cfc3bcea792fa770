"""Collection: the driver that reads tasks, sends `/run`, and writes the result files."""
