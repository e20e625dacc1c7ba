"""Bundles on their way to devices: sign, push, pull, switch, roll back. The design is docs/design/shipping.md."""
