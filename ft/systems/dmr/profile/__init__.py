"""Profiles of a training iteration: the operators that it executes, their durations, its idle windows and its memory
use."""
