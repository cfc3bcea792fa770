"""What an S3 server's refusal, or its silence, means: a problem and what to do about it.

Only the code of an answer is shown, never its text, which may repeat what was sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError, StorageProblem

P = StorageProblem

_WRONG_KEY = "the access key is unknown; check the credentials secret"
_WRONG_SECRET = "the secret key is wrong; check the credentials secret"
_OLD_TOKEN = "the session token has ended or is wrong; renew it in the credentials secret, or use a role"
_DENIED = "the credentials may not do this; check the bucket policy and the credentials' rights"
_FULL = "the storage is full or its quota is used up; free space or raise the quota"
_BUSY = "the storage server asks for fewer requests; wait, or give it more capacity"
_REGION = "the bucket is in another region; set `region`"
_KEY = "the encryption key cannot be used; check `encryption.kmsKeyID`, its state and the rights to it"

KNOWN: Final[Mapping[str, tuple[StorageProblem, str]]] = {
    "NoSuchBucket": (P.BUCKET_MISSING, "the bucket does not exist; create it or correct its name"),
    "InvalidBucketName": (P.BUCKET_MISSING, "the bucket's name is not valid"),
    "AccessDenied": (P.ACCESS_DENIED, _DENIED),
    "AllAccessDisabled": (P.ACCESS_DENIED, _DENIED),
    "403": (P.ACCESS_DENIED, _DENIED),
    "InvalidAccessKeyId": (P.CREDENTIALS_REFUSED, _WRONG_KEY),
    "SignatureDoesNotMatch": (P.CREDENTIALS_REFUSED, _WRONG_SECRET),
    "ExpiredToken": (P.CREDENTIALS_REFUSED, _OLD_TOKEN),
    "InvalidToken": (P.CREDENTIALS_REFUSED, _OLD_TOKEN),
    "RequestTimeTooSkewed": (P.CLOCK_SKEWED, "the clocks of this machine and of the storage differ; set them right"),
    "PermanentRedirect": (P.REGION_WRONG, _REGION),
    "AuthorizationHeaderMalformed": (P.REGION_WRONG, _REGION),
    "IllegalLocationConstraintException": (P.REGION_WRONG, _REGION),
    "SlowDown": (P.BUSY, _BUSY),
    "ServiceUnavailable": (P.BUSY, _BUSY),
    "TooManyRequests": (P.BUSY, _BUSY),
    "503": (P.BUSY, _BUSY),
    "QuotaExceeded": (P.FULL, _FULL),
    "InsufficientStorage": (P.FULL, _FULL),
    "XMinioStorageFull": (P.FULL, _FULL),
    "XMinioAdminBucketQuotaExceeded": (P.FULL, _FULL),
    "507": (P.FULL, _FULL),
    "KMS.NotFoundException": (P.ENCRYPTION_REFUSED, _KEY),
    "KMS.DisabledException": (P.ENCRYPTION_REFUSED, _KEY),
    "KMS.KMSInvalidStateException": (P.ENCRYPTION_REFUSED, _KEY),
    "KMS.InvalidStateException": (P.ENCRYPTION_REFUSED, _KEY),
}
STALE: Final = frozenset(code for code, (problem, _) in KNOWN.items() if problem is P.CREDENTIALS_REFUSED)
"""Codes after which it is worth to look whether there are younger credentials."""
CREATE_ONLY: Final = (
    "the storage server does not implement create-only writes (If-None-Match), without which two writers could both "
    "believe to have published; use a server that honours them, or turn checkpoints off"
)
_LOST_RACE: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_MISSING: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_NOT_IMPLEMENTED: Final = frozenset({"NotImplemented", "501"})
_SILENCE: Final[Mapping[str, tuple[StorageProblem, str]]] = {
    "NoCredentialsError": (P.CREDENTIALS_MISSING, "no S3 credentials; give a credentials secret or a role"),
    "PartialCredentialsError": (P.CREDENTIALS_MISSING, "half of the S3 credentials; give both keys"),
    "CredentialRetrievalError": (P.CREDENTIALS_MISSING, "the role gives no credentials; check the service account"),
    "SSLError": (
        P.CERTIFICATE_REFUSED,
        "the certificate of {endpoint} is not trusted, or it speaks no TLS; give its authority in `caSecret`, and "
        "the host name it is for",
    ),
    "InvalidRegionError": (P.REGION_WRONG, "this is no region's name; correct `region`"),
    "ParamValidationError": (P.FAILED, "such a request cannot be made; check `bucket` and `encryption`"),
    "ReadTimeoutError": (P.SLOW, "{endpoint} did not answer in time; check the storage server's load and health"),
    "ConnectTimeoutError": (
        P.UNREACHABLE,
        "{endpoint} cannot be reached in time; check `endpoint` and the network",
    ),
    "ResponseStreamingError": (P.UNREACHABLE, "the connection was cut in the middle of an answer"),
    "IncompleteReadError": (P.UNREACHABLE, "the connection was cut in the middle of an answer"),
    "ConnectionClosedError": (
        P.UNREACHABLE,
        "the connection was cut; check the storage server and what is before it",
    ),
}
_UNREACHABLE: Final = (P.UNREACHABLE, "{endpoint} cannot be reached; check `endpoint`")


def code_of(response: Mapping[str, Any]) -> str:
    """The code of a refusal; its HTTP status where there is no code."""
    return str((response.get("Error") or {}).get("Code") or _status(response) or "unknown")


def refused(response: Mapping[str, Any], where: str, *, create_only: bool, encrypted: bool) -> StorageError:
    """The error for a refusal. `create_only`: the request was conditional; `encrypted`: it asked for encryption."""
    code, status = code_of(response), _status(response)
    if code in _LOST_RACE:
        return ObjectConflict(f"{where} exists already")
    if code in _MISSING:
        return ObjectMissing(f"{where} does not exist")
    if code in _NOT_IMPLEMENTED and create_only:
        return StorageError(f"{where}: {code}: {CREATE_ONLY}", P.CREATE_ONLY_UNSUPPORTED)
    problem, advice = KNOWN.get(code) or KNOWN.get(str(status)) or (P.FAILED, "the request was refused")
    if problem is P.FAILED and encrypted and (code in _NOT_IMPLEMENTED or "Encryption" in code or "KMS" in code):
        problem, advice = P.ENCRYPTION_REFUSED, "the storage server refuses this encryption; change `encryption`"
    elif problem is P.FAILED and status >= 500:
        advice = "the storage server failed; check its health and free space"
    expected = (response.get("Error") or {}).get("Region")
    if problem is P.REGION_WRONG and expected:
        advice = f"{advice} to {str(expected)[:64]}"
    return StorageError(f"{where}: {code}: {advice}", problem)


def unanswered(error: Exception, where: str, endpoint: str | None) -> StorageError:
    """The error for a request that had no answer, by botocore's name for it. `endpoint`: the address that was asked,
    None where it came to none."""
    name = type(error).__name__
    problem, advice = _SILENCE.get(name, _UNREACHABLE)
    advice = advice.format(endpoint="the endpoint" if endpoint is None else f"the endpoint {_shown(endpoint)}")
    told = advice if problem is P.CREDENTIALS_MISSING else f"{name}: {advice}"
    return StorageError(f"{where}: {told}", problem)


def _shown(address: str) -> str:
    """Scheme, host and port: what stands before an @ may be a password, also one with signs that end a host."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest.rpartition('@')[2])[0]}"


def _status(response: Mapping[str, Any]) -> int:
    status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else 0
