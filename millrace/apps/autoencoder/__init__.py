"""A deep autoencoder that recommends items from ratings."""
