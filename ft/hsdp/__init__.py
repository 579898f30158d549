"""FT-HSDP: replicas that train on when one of them dies, and take it back without waiting (paper: ft_hsdp)."""
