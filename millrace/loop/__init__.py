"""Host loops around compiled programs: training, evaluation, repeat."""
