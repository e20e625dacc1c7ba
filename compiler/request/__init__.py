"""A compile request, and a plan as a value."""
