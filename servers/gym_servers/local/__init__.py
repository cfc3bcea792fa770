"""A stack as local processes: the same manifest, servers and coordination as on Kubernetes."""
