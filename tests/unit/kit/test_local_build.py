"""The module that builds Kubernetes points its staging modules at their releases and pins every version."""

from __future__ import annotations

from gym_kit.cluster.local.build import render_go_mod, staging_replaces, version_flags

UPSTREAM = """module k8s.io/kubernetes

replace (
\tk8s.io/api => ./staging/src/k8s.io/api
\tk8s.io/client-go => ./staging/src/k8s.io/client-go
\texample.org/fork => example.org/other v1.0.0
)
"""


def test_only_staging_modules_are_replaced_by_their_releases() -> None:
    assert staging_replaces(UPSTREAM, "v1.34.4") == [("k8s.io/api", "v0.34.4"), ("k8s.io/client-go", "v0.34.4")]


def test_go_mod_lists_what_to_build_and_at_which_version() -> None:
    text = render_go_mod([("k8s.io/kubernetes", "v1.34.4")], [("k8s.io/api", "v0.34.4")], ["k8s.io/kubernetes/cmd/x"])

    assert text.splitlines()[4:] == [
        "require k8s.io/kubernetes v1.34.4",
        "tool k8s.io/kubernetes/cmd/x",
        "replace k8s.io/api => k8s.io/api v0.34.4",
    ]


def test_programs_report_the_release_they_are_built_from() -> None:
    flags = version_flags("v1.34.4")

    assert "version.gitVersion=v1.34.4 " in flags
    assert "version.gitMajor=1 " in flags
    assert "version.gitMinor=34 " in flags
