"""Splits: how the work of a step is divided over ranks. Placements divide its states."""
