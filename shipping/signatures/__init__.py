"""Signatures of bundles and channels: P-256 keys, DSSE envelopes, the OpenSSF model-signing format."""
