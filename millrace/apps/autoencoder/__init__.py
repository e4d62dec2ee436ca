"""A deep autoencoder that recommends: training, validation, recommendation, sweeps."""
