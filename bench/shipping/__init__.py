"""Measurements of shipping: the bytes that two bundles share."""
