"""Statistics of experts, routes and inputs on text."""
