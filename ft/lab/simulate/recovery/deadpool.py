"""What the paper measured: recovery of a 7B GPT on A100s, per-GPU memory held constant.

Source: DEADPOOL, section VII-B3: "recovery latency increases from 17.1 s to 29.8 s as the system scales from 32 to 512
GPUs" (figure 11; the text gives no number for the sizes between). It is the whole recovery; reconstruction of the
communicators is most of it, restoring state is short and nearly constant.
"""

RECOVERY_S = {32: 17.1, 512: 29.8}
"""GPUs -> seconds."""
