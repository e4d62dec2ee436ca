"""Complete applications: cnn, autoencoder and vcd."""
