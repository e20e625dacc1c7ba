"""Replay a recorded run without its bytes, on another cache, policy, device or clock."""
