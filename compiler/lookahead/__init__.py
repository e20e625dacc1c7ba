"""Linear maps that foresee the routers of later layers."""
