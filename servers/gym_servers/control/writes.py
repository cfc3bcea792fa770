"""A participant's records on their way to storage, and back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Write
from gym_servers.storage.manifest import CodeIdentity, Manifest, PackEntry, RecordEntry
from gym_servers.storage.packs import check_packs, load_manifest, load_records, pack_records, write_records
from gym_servers.storage.store import ObjectStore, StorageError
from gym_servers.unattended import unattended

log = logging.getLogger("gym_servers")

OpenStore = Callable[[str], ObjectStore]


@dataclass(frozen=True)
class Author:
    """Who writes: goes into every manifest."""

    kind: str
    instance: str
    session: str
    code: CodeIdentity

    @property
    def directory(self) -> str:
        return f"{self.kind}/{self.instance}"


class Stopped(Exception):
    """The checkpoint was given up: its manifest must not appear any more."""


class RecordWrite:
    """Frozen records being written. It belongs to its own records alone and may outlive the checkpoint's pause."""

    def __init__(
        self,
        open_store: OpenStore,
        author: Author,
        checkpoint_id: str,
        uri: str,
        records: Mapping[str, bytes],
        episodes: list[str],
        marks: Mapping[str, int],
        *,
        background: bool,
        seconds: float,
    ) -> None:
        self.background = background
        self.status = Write(
            checkpoint_id=checkpoint_id,
            state="writing",
            records=len(records),
            bytes=sum(map(len, records.values())),
        )
        self._stopped = threading.Event()
        frozen = dict(marks)

        def manifest(packs: list[PackEntry], entries: list[RecordEntry]) -> Manifest:
            self._go_on()  # the last look before the manifest makes the records visible
            return Manifest(
                checkpoint_id=checkpoint_id,
                kind=author.kind,
                instance=author.instance,
                session=author.session,
                code=author.code,
                episodes=episodes,
                marks=frozen,
                packs=packs,
                records=entries,
            )

        def write() -> str:
            packs = pack_records(author.directory, records)
            return write_records(open_store(uri), author.directory, packs, manifest, self._go_on)

        self.task = asyncio.ensure_future(self._run(write, seconds))

    async def _run(self, write: Callable[[], str], seconds: float) -> None:
        work = unattended(asyncio.to_thread(write))  # it may end after its deadline
        try:
            digest = await asyncio.wait_for(asyncio.shield(work), seconds)
            self._end("done", manifest_digest=digest)
        except Stopped:
            self._end("stopped")
        except StorageError as error:
            self._end("failed", detail=str(error))
        except TimeoutError:
            # A store that hangs must not keep later checkpoints out for ever.
            self.stop()
            self._end("failed", detail="the records were not written by the deadline")
        except Exception as error:
            log.exception("records of %s could not be written", self.status.checkpoint_id)
            self._end("failed", detail=f"the records could not be written: {type(error).__name__}")

    def _end(self, state: str, **more: str) -> None:
        self.status = self.status.model_copy(update={"state": state, **more})

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    @property
    def running(self) -> bool:
        return not self.task.done()

    def stop(self) -> None:
        """No manifest from now on, unless it is on its way already; then the checkpoint's tombstone decides."""
        self._stopped.set()

    async def result(self) -> Write:
        """The outcome. Raises `checkpoint_error` where the records could not be made durable."""
        await asyncio.shield(self.task)
        if self.status.state != "done":
            raise ProtocolError("checkpoint_error", self.status.detail or "the write was stopped")
        return self.status


def check_written(open_store: OpenStore, author: Author, uri: str, digest: str) -> None:
    """What this participant wrote is still there. Blocks. Raises as read_back."""
    try:
        store = open_store(uri)
        manifest, _ = load_manifest(store, author.directory, digest)
        check_packs(store, manifest.packs)
    except StorageError as error:
        raise ProtocolError("checkpoint_error", str(error)) from error


def read_back(
    open_store: OpenStore, author: Author, uri: str, digest: str | None, *, any_code: bool = False
) -> tuple[Manifest, dict[str, bytes]]:
    """The records this participant wrote into a checkpoint, every digest checked. Blocks.

    Raises `invalid_checkpoint_state` for records that are not whole or not ours, `checkpoint_error` where storage
    cannot be reached.
    """
    try:
        store = open_store(uri)
        manifest, _ = load_manifest(store, author.directory, digest)
        theirs, ours = manifest.code, author.code
        if not any_code and not ours.reads(theirs.server, theirs.record_format):
            raise ProtocolError(
                "invalid_checkpoint_state",
                f"{author.directory} was written by server {theirs.server} with record format "
                f"{theirs.record_format}; this is {ours.server} with format {ours.record_format}",
            )
        return manifest, load_records(store, manifest)
    except StorageError as error:
        raise ProtocolError("checkpoint_error", str(error)) from error
