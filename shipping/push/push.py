"""Push: check bundles, put their files on a store, then name them in the channel.

The channel is written last, so it never names a file that is not there. An interrupted push goes on when it is
repeated: what is on the store with the right content is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from moec.manifests.errors import BundleError, DoesNotFit, StoreFailed
from moec.manifests.progress import Progress

from ..channel import MAX_CHANNEL_BYTES, MAX_SIGNATURE_BYTES, Channel, bundle_path, channel_path, signature_path
from ..signatures.keys import PrivateKey, PublicKey
from ..signatures.model_signature import read_signature
from ..signed_channel import sign_channel
from ..store.interface import Store
from .bundles import ReadyBundle, prepare_bundles, verify_bundles
from .next_channel import (
    ChannelRequest,
    find_channel,
    next_channel,
    note_stored_files,
    other_bundles,
    require_same_model,
)


@dataclass(frozen=True, slots=True)
class PushKeys:
    """Keys of a push.

    signing: signs the channel, and bundles without a signature.
    accepted: further keys whose signatures may be on the channel before, and on bundles.
    """

    signing: PrivateKey
    accepted: Sequence[PublicKey] = ()

    @property
    def public(self) -> list[PublicKey]:
        return [self.signing.public, *self.accepted]


@dataclass(frozen=True, slots=True)
class PushObserver:
    """Callables for the bytes done and the bytes in all.

    verifying: while bundles are checked.
    sending: while files are sent or found on the store.
    """

    verifying: Progress | None = None
    sending: Progress | None = None


@dataclass(slots=True)
class SentBundle:
    """Result of a push for one bundle.

    sent_files, sent_bytes: what the store did not have.
    """

    bundle: ReadyBundle
    sent_files: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """Result of a push."""

    channel: Channel
    bundles: list[SentBundle] = field(default_factory=list)


def push_bundles(
    paths: Sequence[Path],
    store: Store,
    keys: PushKeys,
    request: ChannelRequest,
    now: datetime,
    observer: PushObserver | None = None,
    again: bool = False,
) -> Pushed:
    """Put bundles on a store and name them in a channel.

    paths: folders of the bundles, of one model, at most one for each device.
    now: moment in UTC.
    again: send all files, whatever is on the store.
    Raises BundleError, InputError, OptionError before anything is sent. Raises StoreFailed, DoesNotFit.
    """
    observer = observer or PushObserver()
    ready = prepare_bundles(paths, keys.signing, keys.accepted)
    found = find_channel(store, request.name, keys.public)
    channels = other_bundles(store, found, request, keys.public)
    require_same_model(store, channels, ready[0].model)
    channel = next_channel(found.channel, ready, request, now)
    data = sign_channel(channel, keys.signing)
    if len(data) > MAX_CHANNEL_BYTES:
        raise DoesNotFit(f"the channel has {len(data)} bytes, at most {MAX_CHANNEL_BYTES}", "push fewer devices")
    verify_bundles(ready, observer.verifying)
    if not again:
        note_stored_files(store, channels)
    sent = _Sending(store, ready, observer.sending, again).run()
    for bundle in ready:
        _put_signature(store, bundle, keys.signing.public)
    path = channel_path(request.name)
    if store.read_small(path, MAX_CHANNEL_BYTES) != found.data:
        raise StoreFailed(f"`{store.address}/{path}` has changed during the push", "push again: no file is sent twice")
    store.replace(path, data)
    return Pushed(channel, sent)


class _Sending:
    """Puts the files of bundles on a store and reports the bytes."""

    def __init__(self, store: Store, ready: Sequence[ReadyBundle], progress: Progress | None, again: bool) -> None:
        self._store, self._ready, self._progress, self._again = store, ready, progress, again
        self._total = sum(bundle.entry.total_bytes for bundle in ready)
        self._done = self._end = 0

    def run(self) -> list[SentBundle]:
        """Send what the store does not have."""
        return [self._send(bundle) for bundle in self._ready]

    def _send(self, bundle: ReadyBundle) -> SentBundle:
        result, folder = SentBundle(bundle), bundle.entry.manifest_sha256
        for file in bundle.files:
            self._end += file.size_bytes
            is_new = self._store.put(
                bundle_path(folder, file.name),
                bundle.path / file.name,
                file.size_bytes,
                file.sha256,
                self._advance,
                self._again,
            )
            if is_new:
                result.sent_files += 1
                result.sent_bytes += file.size_bytes
            self._done = self._end
            self._advance(0)
        self._store.commit(folder)
        return result

    def _advance(self, sent_bytes: int) -> None:
        # A repeated request sends bytes again.
        self._done = min(self._done + sent_bytes, self._end)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _put_signature(store: Store, bundle: ReadyBundle, key: PublicKey) -> None:
    """Write the signature of a bundle, unless the store has it, or another one by the same key."""
    path = signature_path(bundle.entry.manifest_sha256)
    stored = store.read_small(path, MAX_SIGNATURE_BYTES)
    if stored == bundle.signature or (stored is not None and bundle.is_signed_now and _is_valid(stored, bundle, key)):
        return
    store.replace(path, bundle.signature)


def _is_valid(signature: bytes, bundle: ReadyBundle, key: PublicKey) -> bool:
    try:
        digests = read_signature(signature, [key], str(bundle.path)).digests
    except BundleError:
        return False
    return digests == {file.name: file.sha256 for file in bundle.files}
