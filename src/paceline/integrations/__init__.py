"""Paceline inside other libraries."""
