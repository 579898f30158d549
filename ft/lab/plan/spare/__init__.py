"""``ft plan spare``: how many failures SPARe endures, what it computes for that, and how it is laid out."""
