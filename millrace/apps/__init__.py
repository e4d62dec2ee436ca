"""Complete applications on top of the runtime: cnn, autoencoder and vcd."""
