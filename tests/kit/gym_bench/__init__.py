"""What the operator costs: `make bench-operator`."""
