"""Ties the operator to the cluster: watches, settings of the framework, and the health endpoint."""
