"""What people and scripts see: tables, progress, JSON, reports."""
