"""What every part knows: errors, events, quantities, command lines, the run's token. Imports nothing of ft."""
