"""Integrations of Paceline with other libraries."""
