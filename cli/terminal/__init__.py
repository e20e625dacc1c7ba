"""Output for people and scripts: tables, progress, JSON, reports."""
