"""Every error that moec raises on purpose, with the exit code for scripts.

    MoecError                         1
      InputError                      1   unusable input
        CheckpointError                   MODEL_DIR: family, tensors, shapes, values
        DataError                         task data: files, lines, fields
        ProfileError                      device profiles
        OptionError                       options that contradict each other

      PlanError                       1   unreachable request
        TargetUnreachable                 no offered format meets the target
        DoesNotFit                        memory or disk too small, with the number
          DiskFull                 75     no space at this moment

        DeviceRefused               4   a channel without a bundle for this device

      ExecutionError                  1   failure while running
        MemoryBudgetExceeded
        ContextOverflow                   prompt longer than the context
        StorageReadFailed
        KernelUnavailable
        AcceleratorUnavailable
        StoreFailed                 5   a store that does not answer, or answers wrongly

        TryAgain                   75   another process is in the way at this moment

      MissingDependency               1   an extra is not installed

      BundleError                     3   a damaged or foreign bundle
        ManifestInvalid
        UnknownFormatVersion
        BundleIncomplete
        ChecksumMismatch

        SignatureInvalid                  a signature that is missing, malformed or of another key
        ChannelRefused                    an expired channel, or one that is older than what is installed

A message is one sentence: the place, the expected and the found value. `hint` has one remedy.
"""

from __future__ import annotations


class MoecError(Exception):
    """Base of all errors that a user can act on.

    message: one sentence, lower case, no full stop.
    hint: one remedy, or None.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InputError(MoecError):
    """Input that cannot be used."""


class CheckpointError(InputError):
    """A model folder that cannot be compiled."""


class DataError(InputError):
    """Task data that cannot be read or scored."""


class ProfileError(InputError):
    """A device profile that cannot be used."""


class OptionError(InputError):
    """Options that contradict each other or have no effect."""


class PlanError(MoecError):
    """A request that cannot be met."""


class TargetUnreachable(PlanError):
    """No offered format meets the target. The message has the best reachable value."""


class DoesNotFit(PlanError):
    """Memory or disk is too small. The message has the need."""


class DiskFull(DoesNotFit):
    """A disk has no space at this moment. Another try may succeed when there is space."""

    exit_code = 75


class DeviceRefused(PlanError):
    """A channel has no bundle that this device can run. The message lists the devices that it has."""

    exit_code = 4


class ExecutionError(MoecError):
    """A failure while a bundle runs."""


class MemoryBudgetExceeded(ExecutionError):
    """The budget is below the floor. The message has the floor."""


class ContextOverflow(ExecutionError):
    """A prompt does not fit into the context."""


class StorageReadFailed(ExecutionError):
    """Reading an expert from storage failed."""


class KernelUnavailable(ExecutionError):
    """A forced instruction set is unknown or not supported by this processor."""


class AcceleratorUnavailable(ExecutionError):
    """A requested accelerator is missing, or has less memory than its budget."""


class StoreFailed(ExecutionError):
    """A store does not answer, or answers wrongly. Another try later may succeed."""

    exit_code = 5


class TryAgain(ExecutionError):
    """Another process is in the way at this moment. Another try later may succeed."""

    exit_code = 75


class MissingDependency(MoecError):
    """A command needs an extra that is not installed."""


class BundleError(MoecError):
    """A bundle that must not be run."""

    exit_code = 3


class ManifestInvalid(BundleError):
    """The manifest does not have the form that its version promises."""


class UnknownFormatVersion(BundleError):
    """The bundle has a format version that this moec does not support."""


class BundleIncomplete(BundleError):
    """A listed file is missing, or a file is there that the manifest does not list."""


class ChecksumMismatch(BundleError):
    """Bytes differ from the digest that the manifest records."""


class SignatureInvalid(BundleError):
    """A signature is missing or malformed, or no accepted key made it."""


class ChannelRefused(BundleError):
    """A channel has expired, or it is older than what is installed."""
