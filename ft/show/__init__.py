"""Presentation shared by all outputs: text for terminals, axes and colours for pictures, fragments of HTML."""
