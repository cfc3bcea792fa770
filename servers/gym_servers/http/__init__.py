"""What every server shares on HTTP: the episode in the path, sessions in cookies, errors, and calls to peers."""
