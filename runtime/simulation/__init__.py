"""A recorded run replayed without its bytes, on another cache, policy, device or clock."""
