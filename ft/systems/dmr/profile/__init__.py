"""Profiles of a training iteration: its operators with their durations, its idle windows, and its memory use."""
