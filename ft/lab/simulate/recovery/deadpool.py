"""Published recovery times of DEADPOOL: a 7B GPT on A100s, with constant memory per GPU.

Source: DEADPOOL, section VII-B3: "recovery latency increases from 17.1 s to 29.8 s as the system scales from 32 to 512
GPUs" (figure 11; the text gives no number for the sizes between). This is the whole recovery; most of it is the
reconstruction of communicators, while restoring state is short and nearly constant.
"""

RECOVERY_S = {32: 17.1, 512: 29.8}
"""Number of GPUs -> recovery time in seconds."""
