"""Every error that moec raises on purpose, with the exit code a script sees.

    MoecError                         1
      InputError                      1   what the user handed in
        CheckpointError                   MODEL_DIR: family, tensors, shapes, values
        DataError                         task data: files, lines, fields
        ProfileError                      device profiles
        OptionError                       options that contradict each other
      PlanError                       1   what was asked cannot be had
        TargetUnreachable                 no offered format meets the target
        DoesNotFit                        memory or disk too small, with the number
      ExecutionError                  1   while running
        MemoryBudgetExceeded
        ContextOverflow                   prompt longer than the context
        StorageReadFailed
        KernelUnavailable
        AcceleratorUnavailable
      MissingDependency               1   an extra is not installed
      BundleError                     3   a damaged or foreign bundle
        ManifestInvalid
        UnknownFormatVersion
        BundleIncomplete
        ChecksumMismatch

A message is one sentence: the place, what was expected, what was found. `hint` holds one remedy.
"""

from __future__ import annotations


class MoecError(Exception):
    """Base of all errors a user can act on.

    message: one sentence, lower case, no full stop. hint: one remedy, or None.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InputError(MoecError):
    """Something the user handed in cannot be used."""


class CheckpointError(InputError):
    """A model folder that cannot be compiled."""


class DataError(InputError):
    """Task data that cannot be read or scored."""


class ProfileError(InputError):
    """A device profile that cannot be used."""


class OptionError(InputError):
    """Options that contradict each other or have no effect."""


class PlanError(MoecError):
    """What was asked for cannot be had."""


class TargetUnreachable(PlanError):
    """No offered format meets the target; the message carries the best reachable."""


class DoesNotFit(PlanError):
    """Memory or disk is too small; the message carries the need."""


class ExecutionError(MoecError):
    """A failure while a bundle runs."""


class MemoryBudgetExceeded(ExecutionError):
    """The budget is under the floor; the message carries the floor."""


class ContextOverflow(ExecutionError):
    """A prompt does not fit into the context."""


class StorageReadFailed(ExecutionError):
    """Reading an expert from storage failed."""


class KernelUnavailable(ExecutionError):
    """A forced instruction set is unknown or not supported by this processor."""


class AcceleratorUnavailable(ExecutionError):
    """An accelerator that was asked for is not there, or has less memory than its budget."""


class MissingDependency(MoecError):
    """A command needs an extra that is not installed."""


class BundleError(MoecError):
    """A bundle that must not be run."""

    exit_code = 3


class ManifestInvalid(BundleError):
    """The manifest does not have the form that its version promises."""


class UnknownFormatVersion(BundleError):
    """The bundle was written in a format this moec does not know."""


class BundleIncomplete(BundleError):
    """A listed file is missing, or a file is there that the manifest does not list."""


class ChecksumMismatch(BundleError):
    """Bytes differ from the digest that the manifest records."""
