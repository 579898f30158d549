"""The data pipeline: ``tokenizer`` of the run, megatron-core's ``datasets`` for it, and the ``loader`` of microbatches.

With several replicas of the model (FT-HSDP), each replica reads a stream of its own.
"""
