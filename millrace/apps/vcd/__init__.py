"""VCD: a variational autoencoder whose posterior is refined by Markov chains."""
