"""Read a channel from a store, and compare it with what the device remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from moec.manifests.errors import ChannelRefused, StoreFailed

from ..channel import MAX_CHANNEL_BYTES, Channel, decode_moment
from ..installed.state import DeviceState
from ..signatures.keys import PublicKey
from ..signed_channel import named_channel_path, verify_channel
from ..store.interface import Store


def read_channel(
    store: Store, name: str, keys: Sequence[PublicKey], now: datetime, warn: Callable[[str], object]
) -> Channel:
    """Return a channel whose signature, name and expiry were checked.

    now: moment in UTC. A clock before the date of the channel is told, and the sequence decides.
    Raises StoreFailed if there is none. Raises SignatureInvalid, ChannelRefused, InputError.
    """
    path = named_channel_path(name)
    place = f"{store.address}/{path}"
    data = store.read_small(path, MAX_CHANNEL_BYTES)
    if data is None:
        raise StoreFailed(f"`{store.address}` has no channel `{name}`", "name another channel, or push it first")
    channel = verify_channel(data, keys, place)
    if channel.channel != name:
        raise ChannelRefused(
            f"`{place}` is the channel `{channel.channel}`, expected `{name}`", "get it from another store"
        )
    if now >= decode_moment(channel.expires):
        raise ChannelRefused(
            f"the channel `{name}` with sequence {channel.sequence} expired at {channel.expires}",
            "push it again, and check the clock of this device",
        )
    if now < decode_moment(channel.created):
        warn(
            f"the clock of this device is before {channel.created}, when the channel `{name}` was signed; "
            "its sequence decides, but nobody notices if it has expired"
        )
    return channel


def check_channel(channel: Channel, state: DeviceState | None) -> None:
    """Compare a channel with what a device remembers.

    Raises ChannelRefused for another model, and for a lower sequence than the device has seen.
    """
    if state is None:
        return
    if channel.model != state.model:
        raise ChannelRefused(
            f"the channel has bundles of `{channel.model[:80]}`, this folder those of `{state.model[:80]}`",
            "name another folder",
        )
    highest = state.channel(channel.channel).highest_sequence
    if channel.sequence < highest:
        raise ChannelRefused(
            f"the channel `{channel.channel}` has sequence {channel.sequence}, this device has seen {highest}",
            "the store is out of date, or someone replays an old channel: use another store, or push again",
        )
