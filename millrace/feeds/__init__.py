"""The race: all that crosses between host and device, inwards and outwards."""
