"""The framework's way into the cluster: the same as the client's, so that there is one place to configure."""

from __future__ import annotations

import kopf

from gym_operator.effects.kube import load_configuration


async def connection_info(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Address and credentials in the framework's form. Raises KubeConfigError."""
    configuration = await load_configuration(kubeconfig)
    header = await configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = header.rpartition(" ") if header else ("", "", "")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
