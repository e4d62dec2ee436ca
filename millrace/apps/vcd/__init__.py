"""Variational contrastive divergence: a VAE whose posterior is refined by HMC."""
