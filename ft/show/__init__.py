"""How figures, tables and pages look: text for terminals, axes and colours of pictures, pieces of HTML."""
