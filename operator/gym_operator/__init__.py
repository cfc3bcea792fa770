"""The Kubernetes operator: keeps stacks of Gym servers running and their rollouts alive.

`api` describes the kinds, `rules` decides in pure code, `effects` acts, `handlers` ties both to the cluster.
`plugin` is `kubectl gym`, for people.
"""
