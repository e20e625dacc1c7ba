"""Measurements of shipping: the bytes that two bundles share; pulls next to curl, zsync and content-defined chunks."""
